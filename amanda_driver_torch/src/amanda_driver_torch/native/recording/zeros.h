// Counts zeros and small elements of tensors.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

int add_zeros(PyObject* module);

}  // namespace amanda
