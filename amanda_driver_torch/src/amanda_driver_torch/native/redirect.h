// The redirected functions of torch: the originals in its tables, and their replacements.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "identity.h"

namespace amanda {

// One function of torch that is an operator.
struct alignas(64) Definition {
    // Read by every call, so kept in one cache line.
    void* original;
    OpType type;
    bool bound;   // takes `self`
    bool single;  // takes one argument, not a tuple
    bool installed;
    void** where;  // the pointer that is redirected
    void* replacement;
    PyObject* call;  // strong: calls the original, by the binding's own convention
    PyObject* operator_;  // strong, made when first used

    PyObject* binding;  // strong: the binding in Python
    PyObject* name;

    // Borrowed; null with an exception.
    PyObject* get_operator();
};

// Returns the number of an op type's name. False on error.
bool intern_type(PyObject* name, OpType* type);


int add_redirect(PyObject* module);

}  // namespace amanda
