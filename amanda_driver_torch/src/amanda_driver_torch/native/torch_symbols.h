// Questions that are asked at every operator, put to torch's library without Python objects.
//
// The functions are exported and take and return plain values, so no headers are needed. Where a
// version of torch has them no longer, Python's bindings are called: slower, same answer.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace amanda {

// Looks the symbols up in the library that `address` lies in, and keeps the Python functions that
// stand in for them. -1 on error.
int find_symbols(const void* address, PyObject* is_grad_enabled, PyObject* sequence_number);

bool gradients_enabled();
// Whether `set_gradients` may be called.
bool can_set_gradients();
void set_gradients(bool on);
uint64_t next_sequence_number();

}  // namespace amanda
