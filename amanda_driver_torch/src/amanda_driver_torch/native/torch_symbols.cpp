// Lookup of the symbols by their mangled names (Itanium ABI: Linux and macOS).
#include "torch_symbols.h"

#include <utility>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace amanda {

namespace {

bool (*enabled)() = nullptr;             // c10::GradMode::is_enabled()
void (*set_enabled)(bool) = nullptr;     // c10::GradMode::set_enabled(bool)
uint64_t (*sequence)() = nullptr;        // at::sequence_number::peek()
int64_t (*function_modes)() = nullptr;   // at::impl::PythonTorchFunctionTLS::stack_len()
int64_t (*dispatch_modes)() = nullptr;   // c10::impl::TorchDispatchModeTLS::stack_len()
bool (*profiling)() = nullptr;           // torch::profiler::impl::profilerEnabled()
// torch::jit::tracer::getTracingState(), a std::shared_ptr: its first word is the pointer.
void* const* (*tracing)() = nullptr;
// at::functorch::functorchTLSAccessor(), a std::shared_ptr to the state that follows. That state is
// created on first access, and then copied with every copy of the thread's state.
void* const* (*transformed)() = nullptr;
// at::functorch::getDynamicLayerStack(), a std::vector: its first words are begin and end.
void* const* (*transforms)() = nullptr;
// at::native::is_set_to(const at::Tensor&, const at::Tensor&): a tensor is one pointer.
bool (*set_to)(void* const&, void* const&) = nullptr;
// THPVariable_Wrap(const at::TensorBase&)
PyObject* (*wrapped)(void* const&) = nullptr;
// at::TensorBase::grad_fn() const, a smart pointer: its first word is the pointer.
void* const& (*made_by)(void* const&) = nullptr;
// at::TensorBase::output_nr() const
int64_t (*output_number)(void* const&) = nullptr;
void* undefined = nullptr;  // c10::UndefinedTensorImpl::_singleton
bool (*gradient_required)(const void*) = nullptr;  // c10::TensorImpl::requires_grad() const
// Functions for compiled code, which return errors.
int32_t (*get_dimensions)(void* const*, int64_t*) = nullptr;
int32_t (*get_dtype)(void* const*, int32_t*) = nullptr;
int32_t (*get_contiguous)(void* const*, bool*) = nullptr;
int32_t (*get_sizes)(void* const*, int64_t**) = nullptr;
int32_t (*get_strides)(void* const*, int64_t**) = nullptr;
int32_t (*get_device)(void* const*, int32_t*) = nullptr;
int32_t (*get_offset)(void* const*, int64_t*) = nullptr;
int32_t (*get_storage_size)(void* const*, int64_t*) = nullptr;
int32_t (*new_tensor)(void* const*, void***) = nullptr;
int32_t (*delete_tensor)(void**) = nullptr;
void* plain_class = nullptr;  // the virtual functions of c10::TensorImpl
bool (*storage_there)(const void*) = nullptr;        // c10::TensorImpl::has_storage() const
bool (*negated)(void* const&) = nullptr;             // at::native::is_neg(const at::Tensor&)
bool (*conjugated)(void* const&) = nullptr;          // at::native::is_conj(const at::Tensor&)
bool (*without_version)(void* const&) = nullptr;     // at::native::is_inference(const at::Tensor&)
int64_t (*version)(void* const&) = nullptr;          // at::TensorBase::_version() const
// at::TensorBase::const_data_ptr<const T>() const, which copies nothing, for each dtype by its
// number in torch.
constexpr int32_t DTYPES = 16;
const void* (*data_of[DTYPES])(void* const&) = {};

// A tensor as torch returns it. It must be moved away, since it cannot be destroyed here.
struct Returned {
    void* tensor;
    ~Returned() {}  // Like torch's, so that it is returned in the same way.
};
struct Sizes {
    const int64_t* sizes;
    size_t count;
};
PyObject* (*wrapped_away)(Returned*) = nullptr;  // THPVariable_Wrap(at::TensorBase&&)
Returned (*reshape)(void* const&, Sizes) = nullptr;  // at::_ops::reshape::call
Returned (*transpose)(void* const&) = nullptr;       // at::_ops::t::call
Returned (*permute)(void* const&, Sizes) = nullptr;  // at::_ops::permute::call

Bindings in_python{};

struct Symbol {
    const char* name;
    void** place;
    const char* older = nullptr;  // its name in earlier releases
};

// Some releases tell constant types apart by a second parameter of the template.
#define CONST_DATA(type, place)                                                                  \
    {"_ZNK2at10TensorBase14const_data_ptrIK" type "EEPKT_v", place_of(place),                    \
     "_ZNK2at10TensorBase14const_data_ptrIK" type "Li0EEEPKNSt12remove_constIT_E4typeEv"}

template <class F>
void** place_of(F*& function) {
    return reinterpret_cast<void**>(&function);
}

const Symbol SYMBOLS[] = {
    {"_ZN3c108GradMode10is_enabledEv", place_of(enabled)},
    {"_ZN3c108GradMode11set_enabledEb", place_of(set_enabled)},
    {"_ZN2at15sequence_number4peekEv", place_of(sequence)},
    {"_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", place_of(function_modes)},
    {"_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", place_of(dispatch_modes)},
    {"_ZN5torch8profiler4impl15profilerEnabledEv", place_of(profiling)},
    {"_ZN5torch3jit6tracer15getTracingStateEv", place_of(tracing)},
    {"_ZN2at9functorch20functorchTLSAccessorEv", place_of(transformed)},
    {"_ZN2at9functorch20getDynamicLayerStackEv", place_of(transforms)},
    {"_ZN2at6native9is_set_toERKNS_6TensorES3_", place_of(set_to)},
    {"_Z16THPVariable_WrapRKN2at10TensorBaseE", place_of(wrapped)},
    {"_ZNK2at10TensorBase7grad_fnEv", place_of(made_by)},
    {"_ZNK2at10TensorBase9output_nrEv", place_of(output_number)},
    {"_ZNK3c1010TensorImpl13requires_gradEv", place_of(gradient_required)},
    {"_ZN3c1019UndefinedTensorImpl10_singletonE", &undefined},
    {"aoti_torch_get_dim", place_of(get_dimensions)},
    {"aoti_torch_get_dtype", place_of(get_dtype)},
    {"aoti_torch_is_contiguous", place_of(get_contiguous)},
    {"aoti_torch_get_sizes", place_of(get_sizes)},
    {"aoti_torch_get_strides", place_of(get_strides)},
    {"aoti_torch_get_device_type", place_of(get_device)},
    {"aoti_torch_get_storage_offset", place_of(get_offset)},
    {"aoti_torch_get_storage_size", place_of(get_storage_size)},
    {"aoti_torch_new_tensor_handle", place_of(new_tensor)},
    {"aoti_torch_delete_tensor_object", place_of(delete_tensor)},
    {"_ZTVN3c1010TensorImplE", &plain_class},
    {"_ZNK3c1010TensorImpl11has_storageEv", place_of(storage_there)},
    {"_ZN2at6native6is_negERKNS_6TensorE", place_of(negated)},
    {"_ZN2at6native7is_conjERKNS_6TensorE", place_of(conjugated)},
    {"_ZN2at6native12is_inferenceERKNS_6TensorE", place_of(without_version)},
    {"_ZNK2at10TensorBase8_versionEv", place_of(version)},
    CONST_DATA("h", data_of[0]),
    CONST_DATA("a", data_of[1]),
    CONST_DATA("s", data_of[2]),
    CONST_DATA("i", data_of[3]),
    CONST_DATA("l", data_of[4]),
    CONST_DATA("N3c104HalfE", data_of[kHalf]),
    CONST_DATA("f", data_of[kFloat]),
    CONST_DATA("d", data_of[kDouble]),
    CONST_DATA("N3c107complexIfEE", data_of[9]),
    CONST_DATA("N3c107complexIdEE", data_of[10]),
    CONST_DATA("b", data_of[11]),
    CONST_DATA("N3c108BFloat16E", data_of[kBFloat16]),
    {"_Z16THPVariable_WrapON2at10TensorBaseE", place_of(wrapped_away)},
    {"_ZN2at4_ops7reshape4callERKNS_6TensorEN3c108ArrayRefINS5_6SymIntEEE", place_of(reshape)},
    {"_ZN2at4_ops1t4callERKNS_6TensorE", place_of(transpose)},
    {"_ZN2at4_ops7permute4callERKNS_6TensorEN3c108ArrayRefIlEE", place_of(permute)},
};
#undef CONST_DATA

PyObject* hidden = nullptr;  // a frozenset, or null

// (names): from now on, these symbols and parts of graphs are not found.
PyObject* hide(PyObject*, PyObject* names) {
    if (!PyFrozenSet_Check(names)) {
        PyErr_SetString(PyExc_TypeError, "hide(frozenset)");
        return nullptr;
    }
    Py_XSETREF(hidden, Py_NewRef(names));
    Py_RETURN_NONE;
}

PyObject* symbols(PyObject*, PyObject*) {
    PyObject* found = PyDict_New();
    for (const Symbol& symbol : SYMBOLS) {
        PyObject* is_there = *symbol.place != nullptr ? Py_True : Py_False;
        if (found != nullptr && PyDict_SetItemString(found, symbol.name, is_there) < 0) {
            Py_CLEAR(found);
        }
    }
    return found;
}

PyMethodDef methods[] = {
    {"hide", hide, METH_O,
     "hide(names, /)\n--\n\n"
     "Find none of these symbols and parts of graphs from now on, as if torch had none."},
    {"symbols", symbols, METH_NOARGS,
     "symbols()\n--\n\nReturn the names of torch's symbols that are called, and whether each was "
     "found."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool is_hidden(const char* name) {
    if (hidden == nullptr) return false;
    PyObject* text = PyUnicode_FromString(name);
    bool found = text != nullptr && PySet_Contains(hidden, text) == 1;
    Py_XDECREF(text);
    return found;
}

int add_torch_symbols(PyObject* module) { return PyModule_AddFunctions(module, methods); }

void find_symbols(const void* address, const Bindings& bindings) {
    Py_XSETREF(in_python.is_grad_enabled, Py_NewRef(bindings.is_grad_enabled));
    Py_XSETREF(in_python.sequence_number, Py_NewRef(bindings.sequence_number));
    Py_XSETREF(in_python.function_modes, Py_NewRef(bindings.function_modes));
    Py_XSETREF(in_python.is_observed, Py_NewRef(bindings.is_observed));
    Py_XSETREF(in_python.fake_tensor_checks, Py_NewRef(bindings.fake_tensor_checks));
#if !defined(_WIN32)
    Dl_info info;
    void* library = nullptr;
    if (address != nullptr && dladdr(address, &info) != 0 && info.dli_fname != nullptr) {
        // RTLD_NOLOAD: look up in loaded libraries only, including dependencies.
        library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    for (const Symbol& symbol : SYMBOLS) {
        bool is_sought = library != nullptr && !is_hidden(symbol.name);
        *symbol.place = is_sought ? dlsym(library, symbol.name) : nullptr;
        if (is_sought && *symbol.place == nullptr && symbol.older != nullptr) {
            *symbol.place = dlsym(library, symbol.older);
        }
    }
    if (library != nullptr) dlclose(library);  // This releases our handle only; torch stays loaded.
#else
    (void)address;
#endif
}

bool gradients_enabled() {
    if (enabled != nullptr) return enabled();
    PyObject* answer = PyObject_CallNoArgs(in_python.is_grad_enabled);
    if (answer == nullptr) PyErr_Clear();
    Py_XDECREF(answer);
    return answer == Py_True;
}

bool can_compare_places() { return set_to != nullptr; }

bool lie_alike(void* one, void* other) {
    try {
        return set_to(one, other);
    } catch (...) {
        return false;  // A tensor without a storage.
    }
}

bool can_set_gradients() { return set_enabled != nullptr; }

void set_gradients(bool on) { set_enabled(on); }

bool can_read_tensors() {
    return wrapped != nullptr && made_by != nullptr && output_number != nullptr &&
           undefined != nullptr && gradient_required != nullptr && get_dimensions != nullptr &&
           get_dtype != nullptr && get_contiguous != nullptr && get_sizes != nullptr;
}

PyObject* wrap(void* const& tensor) { return wrapped(tensor); }

void* node_that_made(void* const& tensor) {
    try {
        return made_by(tensor);
    } catch (...) {
        return nullptr;  // A view whose base was written may have no node any more.
    }
}

int64_t number_of_output(void* const& tensor) { return output_number(tensor); }

void* undefined_tensor() { return undefined; }

bool requires_gradient(void* const& tensor) { return gradient_required(tensor); }

bool is_inference(void* const& tensor) { return without_version(tensor); }

bool can_put_tensors() { return new_tensor != nullptr && delete_tensor != nullptr; }

void put_tensor(void*& place, void* const& tensor) {
    void** made = nullptr;
    if (new_tensor(&tensor, &made) != 0) return;  // Only without memory.
    std::swap(place, *made);
    delete_tensor(made);
}

TensorLayout layout_of(void* const& tensor) {
    TensorLayout layout;
    if (get_dimensions(&tensor, &layout.dimensions) != 0 ||
        get_dtype(&tensor, &layout.dtype) != 0 ||
        get_contiguous(&tensor, &layout.is_contiguous) != 0) {
        return TensorLayout();
    }
    return layout;
}

const int64_t* sizes_of(void* const& tensor) {
    int64_t* sizes = nullptr;
    return get_sizes(&tensor, &sizes) == 0 ? sizes : nullptr;
}

bool can_read_memory() {
    return can_read_tensors() && get_strides != nullptr && get_device != nullptr &&
           plain_class != nullptr && storage_there != nullptr && negated != nullptr &&
           conjugated != nullptr && without_version != nullptr && version != nullptr;
}

namespace {

constexpr size_t SIZES[DTYPES] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0, 2};

// Reads the dtype of a tensor in main memory; false for others, and if its data cannot be read.
bool find_dtype(void* const& tensor, int32_t* dtype) {
    // An object begins with the address of its virtual functions, which follow two words. Those of
    // sparse, nested, quantized and wrapped tensors are other ones.
    if (tensor == nullptr || *static_cast<void* const*>(tensor) !=
                                 static_cast<void*>(static_cast<void**>(plain_class) + 2)) {
        return false;
    }
    int32_t device = -1;
    return storage_there(tensor) && get_device(&tensor, &device) == 0 && device == 0 &&
           get_dtype(&tensor, dtype) == 0 && *dtype >= 0 && *dtype < DTYPES &&
           data_of[*dtype] != nullptr;
}

}  // namespace

bool can_read_storages() {
    return can_read_memory() && get_offset != nullptr && get_storage_size != nullptr;
}

StorageMemory storage_of(void* const& tensor) {
    StorageMemory storage;
    int32_t dtype = -1;
    int64_t offset = 0;
    if (!find_dtype(tensor, &dtype) || get_offset(&tensor, &offset) != 0 ||
        get_storage_size(&tensor, &storage.size) != 0) {
        return storage;
    }
    try {
        auto* data = static_cast<const uint8_t*>(data_of[dtype](tensor));
        if (data != nullptr) storage.data = data - offset * int64_t(SIZES[dtype]);
    } catch (...) {
    }
    return storage;
}

Memory memory_of(void* const& tensor) {
    Memory memory;
    int64_t *sizes = nullptr, *strides = nullptr;
    if (!find_dtype(tensor, &memory.dtype) || negated(tensor) ||
        ((memory.dtype == 9 || memory.dtype == 10) && conjugated(tensor)) ||
        get_dimensions(&tensor, &memory.dimensions) != 0 || get_sizes(&tensor, &sizes) != 0 ||
        get_strides(&tensor, &strides) != 0 ||
        get_contiguous(&tensor, &memory.is_contiguous) != 0) {
        return memory;
    }
    memory.sizes = sizes;
    memory.strides = strides;
    memory.item = SIZES[memory.dtype];
    for (int64_t i = 0; i < memory.dimensions; ++i) memory.elements *= sizes[i];
    try {
        if (!without_version(tensor)) memory.version = version(tensor);
        auto* data = static_cast<const uint8_t*>(data_of[memory.dtype](tensor));
        static const uint8_t nothing = 0;
        memory.data = data == nullptr && memory.elements == 0 ? &nothing : data;
    } catch (...) {
        memory.data = nullptr;
    }
    return memory;
}

bool can_compute() {
    return wrapped_away != nullptr && reshape != nullptr && transpose != nullptr;
}

namespace {

template <class... Arguments>
PyObject* computed(Returned (*function)(void* const&, Arguments...), void* const& tensor,
                   Arguments... arguments) {
    try {
        Returned result = function(tensor, arguments...);
        return wrapped_away(&result);
    } catch (...) {
        return nullptr;
    }
}

}  // namespace

PyObject* reshaped(void* const& tensor, const int64_t* sizes, size_t count) {
    return computed(reshape, tensor, Sizes{sizes, count});
}

PyObject* transposed(void* const& tensor) { return computed(transpose, tensor); }

PyObject* permuted(void* const& tensor, const int64_t* dimensions, size_t count) {
    if (permute == nullptr) return nullptr;  // On macOS its name is another one.
    return computed(permute, tensor, Sizes{dimensions, count});
}

uint64_t next_sequence_number() {
    if (sequence != nullptr) return sequence();
    PyObject* answer = PyObject_CallNoArgs(in_python.sequence_number);
    uint64_t number = answer != nullptr ? PyLong_AsUnsignedLongLong(answer) : 0;
    if (answer == nullptr || PyErr_Occurred()) PyErr_Clear();
    Py_XDECREF(answer);
    return number;
}

namespace {

// If unknown, return true, so that Python handles the op.
bool answers(PyObject* function) {
    PyObject* answer = PyObject_CallNoArgs(function);
    bool is_true = answer == nullptr || PyObject_IsTrue(answer) != 0;
    PyErr_Clear();
    Py_XDECREF(answer);
    return is_true;
}

}  // namespace

bool in_function_modes() {
    return function_modes != nullptr ? function_modes() != 0 : answers(in_python.function_modes);
}

bool is_observed() {
    if (profiling != nullptr && dispatch_modes != nullptr) {
        return dispatch_modes() != 0 || profiling();
    }
    return answers(in_python.is_observed);
}

bool in_stand_ins() {
    if (dispatch_modes != nullptr && tracing != nullptr && transformed != nullptr &&
        transforms != nullptr) {
        if (dispatch_modes() != 0 || *tracing() != nullptr) return true;
        if (*transformed() == nullptr) return false;
        void* const* layers = transforms();
        return layers[0] != layers[1];
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(in_python.fake_tensor_checks); ++i) {
        if (answers(PyTuple_GET_ITEM(in_python.fake_tensor_checks, i))) return true;
    }
    return false;
}

}  // namespace amanda
