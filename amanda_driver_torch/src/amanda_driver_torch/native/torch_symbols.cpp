// Lookup of the symbols by their mangled names (Itanium ABI: Linux and macOS).
#include "torch_symbols.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace amanda {

namespace {

bool (*enabled)() = nullptr;             // c10::GradMode::is_enabled()
void (*set_enabled)(bool) = nullptr;     // c10::GradMode::set_enabled(bool)
uint64_t (*sequence)() = nullptr;        // at::sequence_number::peek()
PyObject *enabled_in_python = nullptr, *sequence_in_python = nullptr;

}  // namespace

int find_symbols(const void* address, PyObject* is_grad_enabled, PyObject* sequence_number) {
    Py_XSETREF(enabled_in_python, Py_NewRef(is_grad_enabled));
    Py_XSETREF(sequence_in_python, Py_NewRef(sequence_number));
#if !defined(_WIN32)
    Dl_info info;
    if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return 0;
    // RTLD_NOLOAD: a lookup in what is loaded, dependencies included.
    void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return 0;
    enabled = reinterpret_cast<bool (*)()>(dlsym(library, "_ZN3c108GradMode10is_enabledEv"));
    set_enabled = reinterpret_cast<void (*)(bool)>(dlsym(library, "_ZN3c108GradMode11set_enabledEb"));
    sequence =
        reinterpret_cast<uint64_t (*)()>(dlsym(library, "_ZN2at15sequence_number4peekEv"));
    dlclose(library);  // Only our handle: torch stays loaded.
#else
    (void)address;
#endif
    return 0;
}

bool gradients_enabled() {
    if (enabled != nullptr) return enabled();
    PyObject* answer = PyObject_CallNoArgs(enabled_in_python);
    if (answer == nullptr) PyErr_Clear();
    Py_XDECREF(answer);
    return answer == Py_True;
}

bool can_set_gradients() { return set_enabled != nullptr; }

void set_gradients(bool on) { set_enabled(on); }

uint64_t next_sequence_number() {
    if (sequence != nullptr) return sequence();
    PyObject* answer = PyObject_CallNoArgs(sequence_in_python);
    uint64_t number = answer != nullptr ? PyLong_AsUnsignedLongLong(answer) : 0;
    if (answer == nullptr || PyErr_Occurred()) PyErr_Clear();
    Py_XDECREF(answer);
    return number;
}

}  // namespace amanda
