// Finds the tensors on memory that a tool does not know.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

int add_storages(PyObject* module);

}  // namespace amanda
