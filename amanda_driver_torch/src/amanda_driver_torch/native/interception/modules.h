// The replacement of `nn.Module.__call__` in C, while tools are applied.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

int add_modules(PyObject* module);

}  // namespace amanda
