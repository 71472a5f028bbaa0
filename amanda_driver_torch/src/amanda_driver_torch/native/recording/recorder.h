// The extension's part of tools that record a digest of every value.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

// Returns true for a recorder's routine, which reads no context and changes nothing.
bool is_note(PyObject* routine);

int add_recorder(PyObject* module);

}  // namespace amanda
