// Freeing deep graphs without deep recursion.
//
// A node that Python has seen is freed by its Python object, and frees the nodes behind it from
// inside its destructor: PyTorch 2.13 ends with a stack overflow where some 40,000 such nodes stand
// one behind the other. Graphs that Python has not seen, it frees in a loop. So what looks at the
// nodes of a program lets some of them hold what is behind them, and where these are freed at a
// great depth, that is set aside and freed later, from a shallow stack.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

// To be called for each node that is looked at, or None; it acts on one in some. False with an
// exception.
bool protect(PyObject* node);

int add_unwinding(PyObject* module);

}  // namespace amanda
