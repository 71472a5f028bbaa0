// The redirected functions of torch: what stood in its tables, and what stands there meanwhile.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "identity.h"

namespace amanda {

// One function of torch's that is an operator.
struct alignas(64) Definition {
    // What every call reads, in one line of the cache.
    void* original;
    OpType type;
    bool bound;   // takes `self`
    bool single;  // takes one argument, not a tuple
    bool installed;
    void** where;  // the pointer that is redirected
    void* replacement;
    PyObject* call;  // strong: calls the original, by the binding's own convention
    PyObject* operator_;  // strong, made at its first use

    PyObject* binding;  // strong: what Python calls it by
    PyObject* name;

    // Borrowed; null with an exception.
    PyObject* get_operator();
};

// The number of an op type's name. False on error.
bool intern_type(PyObject* name, OpType* type);


int add_redirect(PyObject* module);

}  // namespace amanda
