// The extension's part of tools that record a digest of every value.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

int add_recorder(PyObject* module);

}  // namespace amanda
