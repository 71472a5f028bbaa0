// The result of a memoized routine, and what it was made of.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "identity.h"

namespace amanda {

// What changes when a tensor's content may have changed: the tensor or its base, where its elements
// lie, and its tensor version.
class Content {
  public:
    // Reads a plain tensor. False, without an exception, if it has no version.
    bool read(PyObject* tensor);
    // Returns true if `tensor` still is as read.
    bool is(PyObject* tensor) const;
    int traverse(visitproc visit, void* arg) const;

  private:
    // Held, so that neither the tensor's address nor that of its memory becomes another one's.
    Owned base_;
    Owned alias_;  // lies where the tensor lay
    long long version_ = -1;
};

class KeptResult {
  public:
    // Returns the result for `value`, borrowed; null if the routine has to be called.
    PyObject* look_up(PyObject* stamp, PyObject* value) const {
        return result_ && PyList_GET_ITEM(stamp, 0) == stamp_.get() && given_.is(value)
                   ? result_.get()
                   : nullptr;
    }
    // Notes what the routine is about to be given.
    void begin(PyObject* stamp, PyObject* value);
    // Keeps what it made of that, if both have versions.
    void end(PyObject* result);
    int traverse(visitproc visit, void* arg) const;

  private:
    Content given_;
    Owned stamp_, result_;
    bool open_ = false;
};

// Finds the attributes of tensors that are read. -1 with an exception.
int find_tensor_attributes(PyObject* tensor_type);

}  // namespace amanda
