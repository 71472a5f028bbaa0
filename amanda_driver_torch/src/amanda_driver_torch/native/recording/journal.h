// Records when routines were called that do nothing else, without Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

// The type of such a routine, a mark.
extern PyTypeObject* mark_type;

// Returns the mark that records the same as the routine of a step; null, without an exception, for
// other routines. A new reference.
PyObject* mark_of(PyObject* routine, PyObject* step);

int add_journal(PyObject* module);

}  // namespace amanda
