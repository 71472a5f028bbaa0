// The redirection of one class method of torch.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

int add_class_method(PyObject* module);

}  // namespace amanda
