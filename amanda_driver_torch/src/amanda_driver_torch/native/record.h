// The driver's record of an op, `OpRecord`, whose slots are read without an attribute lookup.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace amanda {

// Offsets of its slots.
extern Py_ssize_t idle_epoch_at, idle_nodes_at, program_at, hooks_at;

// Returns what is in a slot, borrowed; null if it is empty.
inline PyObject* slot(PyObject* record, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(record) + offset);
}

// Finds the slots of the type. False with an exception.
bool find_slots(PyObject* record_type);

}  // namespace amanda
