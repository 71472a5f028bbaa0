// The extension module `amanda_driver_torch._native`.
#include "amanda_identity.h"
#include "gradients/gradients.h"
#include "gradients/graphs.h"
#include "gradients/hooking.h"
#include "gradients/nodes.h"
#include "gradients/unwinding.h"
#include "identity/identity.h"
#include "interception/calls.h"
#include "interception/class_method.h"
#include "interception/compiled.h"
#include "interception/modules.h"
#include "interception/redirect.h"
#include "interception/watch_type.h"
#include "programs/program.h"
#include "recording/journal.h"
#include "recording/recorder.h"
#include "recording/storages.h"
#include "recording/zeros.h"
#include "thread.h"
#include "torch_symbols.h"

#if defined(Py_GIL_DISABLED)
#error "The native interceptor relies on the GIL"
#endif

namespace {

int execute(PyObject* module) {
    // torch's tables belong to the process: two interpreters would redirect them twice.
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError,
                        "amanda_driver_torch._native serves the main interpreter only");
        return -1;
    }
    // Redirected functions use the first module's state, so a second one would see nothing.
    static bool loaded = false;
    if (loaded) {
        PyErr_SetString(PyExc_ImportError, "amanda_driver_torch._native is loaded already");
        return -1;
    }
    if (amanda::add_torch_symbols(module) < 0 || amanda::add_thread(module) < 0 || amanda::add_identity(module) < 0 ||
        amanda::add_activation(module) < 0 || amanda::add_watch(module) < 0 ||
        amanda::add_redirect(module) < 0 || amanda::add_graphs(module) < 0 ||
        amanda::add_gradients(module) < 0 || amanda::add_hooking(module) < 0 ||
        amanda::add_nodes(module) < 0 || amanda::add_program(module) < 0 ||
        amanda::add_modules(module) < 0 || amanda::add_class_method(module) < 0 ||
        amanda::add_calls(module) < 0 || amanda::add_compiled(module) < 0 ||
        amanda::add_unwinding(module) < 0 || amanda::add_journal(module) < 0 ||
        amanda::add_recorder(module) < 0 ||
        amanda::add_storages(module) < 0 || amanda::add_zeros(module) < 0) {
        return -1;
    }
    loaded = true;
    return PyModule_AddStringConstant(module, "FRAMES", AMANDA_FRAMES);
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(execute)},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "amanda_driver_torch._native",
    "Intercepts torch's bindings in C, at hardly any cost for operators without a plan.",
    0,
    nullptr,
    slots,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
