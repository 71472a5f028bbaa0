// The redirected functions of torch: the originals in its tables, and their replacements.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

int add_redirect(PyObject* module);

}  // namespace amanda
