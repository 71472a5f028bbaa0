// Replacements in Python whose common case is executed in C.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

// Lets a Python function be called by `call`, which may pass calls to `in_python`.
void set_call(PyObject* function, vectorcallfunc call);
PyObject* in_python(PyObject* function, PyObject* const* args, size_t count, PyObject* names);

int add_calls(PyObject* module);

}  // namespace amanda
