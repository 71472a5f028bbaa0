// Freeing deep graphs without deep recursion.
//
// A node that Python has seen is freed by its Python object, and its destructor frees the nodes
// after it recursively. With some 40,000 such nodes in a row, PyTorch ends with a stack
// overflow. Graphs that Python has not seen are freed in a loop. Therefore, when the driver reads
// nodes of a program, it lets some of them own the nodes after them. If such a node is freed at a
// great depth, these nodes are set aside and freed later, from a shallow stack.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

// Must be called for each node that is read, or None; it acts on some of them. False with an
// exception.
bool protect(PyObject* node);

int add_unwinding(PyObject* module);

}  // namespace amanda
