// Records when routines were called that do nothing else, without Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

int add_journal(PyObject* module);

}  // namespace amanda
