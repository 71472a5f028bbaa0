// PyTorch's private names that the extension uses; Python's side has `torch_internals.internals`.
//
// Besides names of attributes, these are queries of torch's library at every operator, without
// Python objects. The functions are exported, and take and return plain values, so no headers are
// needed. If a version of torch no longer has them, Python's bindings are called, which is slower.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace amanda {

// Attributes with a leading underscore: of tensors, of nodes, of modules.
inline constexpr const char* kBase = "_base";
inline constexpr const char* kParameterMark = "_is_param";
inline constexpr const char* kVersion = "_version";
inline constexpr const char* kAddress = "_cdata";
// The nesting level of forward-mode differentiation, in the module; negative outside of it.
inline constexpr const char* kForwardMode = "torch.autograd.forward_ad";
inline constexpr const char* kForwardLevel = "_current_level";
inline constexpr const char* kBackwardHooks = "_backward_hooks";
inline constexpr const char* kRegisterHookDict = "_register_hook_dict";
inline constexpr const char* kRegistration = "_register_hook";
inline constexpr const char* kSequenceNumber = "_sequence_nr";
inline constexpr const char* kModules = "_modules";

// The class of torch's hooks of each kind, as the compiler names it.
inline constexpr const char* kTensorPreHook = "N5torch8autograd23PyFunctionTensorPreHookE";
inline constexpr const char* kPreHook = "N5torch8autograd17PyFunctionPreHookE";
inline constexpr const char* kPostHook = "N5torch8autograd18PyFunctionPostHookE";

// Python functions that are called instead of symbols that are not found.
struct Bindings {
    PyObject* is_grad_enabled;
    PyObject* sequence_number;
    PyObject* function_modes;  // () -> number of active function modes
    PyObject* is_observed;       // () -> whether dispatch modes or the profiler see operators
    PyObject* fake_tensor_checks;       // tuple of () -> something true while values may be fake tensors
};

// Looks the symbols up in the library that contains `address`; null to use none of them.
void find_symbols(const void* address, const Bindings& bindings);

// Returns true if a symbol, or a part of graphs, is treated as missing, which tests ask for.
bool is_hidden(const char* name);

int add_torch_symbols(PyObject* module);

bool gradients_enabled();
// Returns true if `lie_alike` may be called.
bool can_compare_places();
// Returns true if two tensors, by their `_cdata`, have their elements at the same places. False if
// they have no storage.
bool lie_alike(void* one, void* other);
// Returns true if `set_gradients` may be called.
bool can_set_gradients();
void set_gradients(bool on);
uint64_t next_sequence_number();
// Returns true if the next functions may be called. They take torch's tensors by the place of
// the pointer to them, since this is what a tensor in C++ is.
bool can_read_tensors();
// Returns the Python object of a tensor, or None for an undefined one. Null with an exception.
PyObject* wrap(void* const& tensor);
// Returns the node that made a tensor; null if there is none.
void* node_that_made(void* const& tensor);
// Returns which of the node's outputs it is.
int64_t number_of_output(void* const& tensor);
// Returns the tensor that stands for none, which is not counted.
void* undefined_tensor();
bool requires_gradient(void* const& tensor);
// Returns true if a tensor is one of inference mode; only if `can_read_memory`.
bool is_inference(void* const& tensor);
// Returns true if `put_tensor` may be called.
bool can_put_tensors();
// Puts `tensor` at `place` instead of the tensor there, which loses a reference.
void put_tensor(void*& place, void* const& tensor);

// The layout of a strided tensor.
struct TensorLayout {
    int64_t dimensions = -1;
    int32_t dtype = -1;
    bool is_contiguous = false;
};
TensorLayout layout_of(void* const& tensor);
// Returns as many sizes as it has dimensions.
const int64_t* sizes_of(void* const& tensor);

// Returns true if `memory_of` may be called.
bool can_read_memory();

// Returns true if `storage_of` may be called.
bool can_read_storages();

// The memory of a tensor's storage.
struct StorageMemory {
    const uint8_t* data = nullptr;  // null without elements in main memory
    int64_t size = 0;
};
// Reads a tensor of torch's own class, not of a subclass. Neither copies on write nor throws.
StorageMemory storage_of(void* const& tensor);

// Where the elements of a tensor are, and what they are.
struct Memory {
    const uint8_t* data = nullptr;  // null for what is not a dense tensor in main memory
    size_t item = 0;                // size of an element in bytes
    int64_t version = -1;           // -1 if it has none
    int32_t dtype = -1;
    int64_t dimensions = 0, elements = 1;
    const int64_t *sizes = nullptr, *strides = nullptr;
    bool is_contiguous = false;

    bool is_integer() const { return (dtype >= 0 && dtype <= 4) || dtype == 11; }
};
// Reads a tensor of torch's own class, not of a subclass. Neither copies on write nor throws.
Memory memory_of(void* const& tensor);
// The numbers of floating-point dtypes in torch.
constexpr int32_t kHalf = 5, kFloat = 6, kDouble = 7, kBFloat16 = 15;

// Returns true if the next three functions may be called.
bool can_compute();
// Return the Python object of a changed tensor. Null, perhaps without an exception, if it fails.
PyObject* reshaped(void* const& tensor, const int64_t* sizes, size_t count);
PyObject* transposed(void* const& tensor);
PyObject* permuted(void* const& tensor, const int64_t* dimensions, size_t count);
// Returns true if the user's function modes are active, which see operations on tensors.
bool in_function_modes();
// Of (function, the same hidden from these modes): the one to call now.
inline PyObject* way_of(PyObject* both) {
    return both != nullptr ? PyTuple_GET_ITEM(both, in_function_modes()) : nullptr;
}
// Returns true if dispatch modes or the profiler see them, too.
bool is_observed();
// Returns true if values may be fake tensors now, so that Python has to decide.
bool in_stand_ins();

}  // namespace amanda
