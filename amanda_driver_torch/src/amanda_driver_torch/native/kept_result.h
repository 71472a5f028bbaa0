// The result of a memoized routine, and the state of its argument.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "owned.h"

namespace amanda {

// The state that changes if a tensor's content may have changed: the tensor or its base, where its
// elements lie, and its tensor version.
class Content {
  public:
    // Reads a plain tensor. False, without an exception, if it has no version.
    bool read(PyObject* tensor);
    // Returns true if `tensor` has not changed since `read`.
    bool is(PyObject* tensor) const;
    int traverse(visitproc visit, void* arg) const;

  private:
    // Held, so that no other tensor gets the same address or memory.
    Owned base_;
    Owned alias_;                   // lies where the tensor lay
    void* alias_address_ = nullptr;  // of torch's own object
    long long version_ = -1;
};

// Returns true if a tensor has memory of its own and cannot have a tangent.
bool is_own(PyObject* tensor);

class KeptResult {
  public:
    // Returns the result for `value`, borrowed; null if the routine must be called.
    PyObject* look_up(PyObject* stamp, PyObject* value) const {
        return result_ && is_current(stamp, value) ? result_.get() : nullptr;
    }
    // Returns what the op ran on for `value` without gradients, borrowed; null if it is not known.
    PyObject* replacement(PyObject* stamp, PyObject* value) const {
        return replacement_ && is_current(stamp, value) ? replacement_.get() : nullptr;
    }
    // Records the argument of the next call of the routine; if it may be `written` soon, only one that
    // was not written since the last call.
    void begin(PyObject* stamp, PyObject* value, bool written);
    // Keeps the result of that call, and without gradients what the op ran on instead of the
    // argument, if these have versions.
    void end(PyObject* result, PyObject* replacement);
    int traverse(visitproc visit, void* arg) const;

  private:
    bool is_current(PyObject* stamp, PyObject* value) const {
        return PyList_GET_ITEM(stamp, 0) == stamp_.get() && given_.is(value);
    }

    Content given_;
    Owned stamp_, result_, replacement_;
    long long version_ = -1;  // of the last argument
    bool open_ = false;
};

// Finds the attributes of tensors that are read. Without one of them, no result is kept.
void find_tensor_attributes(PyObject* tensor_type);

}  // namespace amanda
