/* `CallSite`: checks whether an op is called from the same place as last time.
 *
 * Owns the comparison of a call site with the stack, without creating frame objects.
 * `identity/call_sites.py` does the same in Python.
 */
#include "amanda_identity.h"

#include <stddef.h>

#include "parts.h"

/* The frames of `Forward.locate` and of its caller are between `here` and the op's caller. */
#define BETWEEN 2

/* One frame of a call site. */
typedef struct {
    PyCodeObject* code;
    int depth;  /* above the op's caller */
    int offset; /* of its instruction; -1 for any */
} Level;

typedef struct {
    PyObject_VAR_HEAD
    Level levels[1];
} CallSite;

/* Code objects cannot be part of a cycle before the collector (it does not know them), so neither
 * can this. */
static PyObject* call_site_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static char* names[] = {"", NULL};
    PyObject* chain;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:CallSite", names, &PyTuple_Type, &chain)) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(chain);
    CallSite* self = (CallSite*)type->tp_alloc(type, count);
    if (self == NULL) return NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        Level* level = &self->levels[index];
        PyObject* frame = PyTuple_GET_ITEM(chain, index);
        PyCodeObject* code;
        if (!PyTuple_Check(frame)) {
            PyErr_SetString(PyExc_TypeError, "a frame is a tuple of depth, code and offset");
            goto failed;
        }
        if (!PyArg_ParseTuple(frame, "iO!i", &level->depth, &PyCode_Type, &code, &level->offset)) {
            goto failed;
        }
        level->code = code;
        Py_INCREF(code);
        if (level->depth < 0 || (index > 0 && level->depth <= level[-1].depth)) {
            PyErr_SetString(PyExc_ValueError, "frames are given from the innermost outwards");
            goto failed;
        }
    }
    return (PyObject*)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static void call_site_dealloc(CallSite* self) {
    PyTypeObject* type = Py_TYPE(self);
    for (Py_ssize_t index = 0; index < Py_SIZE(self); index++) {
        Py_XDECREF(self->levels[index].code);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

int is_call_site_here(PyObject* call_site, int skipped) {
    CallSite* self = (CallSite*)call_site;
    const Level* level = self->levels;
    const Level* end = level + Py_SIZE(self);
    int depth = -skipped;
    AmandaFrame* frame = amanda_innermost_frame(PyThreadState_Get());
    for (; level != end; level++) {
        for (; depth < level->depth && frame != NULL; depth++) frame = amanda_frame_back(frame);
        if (frame == NULL || amanda_frame_code(frame) != level->code ||
            (level->offset >= 0 && level->offset != amanda_frame_offset(frame))) {
            return 0;
        }
    }
    return 1;
}

static PyObject* call_site_here(PyObject* self, PyObject* Py_UNUSED(none)) {
    return PyBool_FromLong(is_call_site_here(self, BETWEEN));
}

static PyMethodDef call_site_methods[] = {
    {"here", call_site_here, METH_NOARGS,
     "Whether what called the caller of this is called by an op from the call site."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot call_site_slots[] = {
    {Py_tp_new, (void*)call_site_new},
    {Py_tp_dealloc, (void*)call_site_dealloc},
    {Py_tp_methods, call_site_methods},
    {Py_tp_doc, (void*)"A call site, made of (depth, code, offset), innermost first."},
    {0, NULL},
};

static PyType_Spec call_site_spec = {
    .name = "amanda_driver_tf._native.CallSite",
    .basicsize = offsetof(CallSite, levels),
    .itemsize = sizeof(Level),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = call_site_slots,
};

int add_call_site(PyObject* module) {
    PyObject* type = PyType_FromModuleAndSpec(module, &call_site_spec, NULL);
    if (type == NULL) return -1;
    int failed = PyModule_AddType(module, (PyTypeObject*)type);
    Py_DECREF(type);
    return failed;
}
