/* The extension module `amanda_driver_tf._native`. */
#include "parts.h"

static int execute(PyObject* module) {
    if (add_call_site(module) < 0 || add_interceptor(module) < 0) return -1;
    return add_marks(module);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void*)execute},
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "amanda_driver_tf._native",
    .m_doc = "Executes eager ops that need no tool without running Python.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
