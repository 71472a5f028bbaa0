// PyTorch's private names that the extension uses; Python's side has `_torch.internals`.
//
// Beside names of attributes, these are questions that are asked at every operator, put to torch's
// library without Python objects. The functions are exported and take and return plain values, so no headers are needed. Where a
// version of torch has them no longer, Python's bindings are called: slower, same answer.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace amanda {

// Attributes with a leading underscore: of tensors, of nodes, of modules.
inline constexpr const char* kBase = "_base";
inline constexpr const char* kBackwardHooks = "_backward_hooks";
inline constexpr const char* kRegisterHookDict = "_register_hook_dict";
inline constexpr const char* kSequenceNumber = "_sequence_nr";
inline constexpr const char* kModules = "_modules";

// Python functions that stand in for symbols that are not found.
struct Bindings {
    PyObject* is_grad_enabled;
    PyObject* sequence_number;
    PyObject* function_modes;  // () -> number of function modes in force
    PyObject* overheard;       // () -> whether dispatch modes or the profiler hear of operators
    PyObject* stand_ins;       // tuple of () -> something true while values may be stand-ins
};

// Looks the symbols up in the library that `address` lies in; null for none of them.
void find_symbols(const void* address, const Bindings& bindings);

bool gradients_enabled();
// Whether `set_gradients` may be called.
bool can_set_gradients();
void set_gradients(bool on);
uint64_t next_sequence_number();
// Whether function modes of the user's are in force, which hear of what is done to tensors.
bool in_function_modes();
// Whether dispatch modes or the profiler hear of it, too.
bool overheard();
// Whether values may be stand-ins for tensors now; then Python says what to do.
bool in_stand_ins();

}  // namespace amanda
