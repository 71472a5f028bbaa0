// The type of watches.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

int add_watch(PyObject* module);

}  // namespace amanda
