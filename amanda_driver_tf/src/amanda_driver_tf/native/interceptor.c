/* The type `Interceptor`, and functions shared by its methods. */
#include "interceptor.h"

#include <structmember.h>

#include "parts.h"

Names names;

int equal(PyObject* left, PyObject* right) {
    return left != NULL && right != NULL && PyObject_RichCompareBool(left, right, Py_EQ) == 1;
}

/* Release a value; return false only if it exists and is false. */
int is_true(PyObject* value) {
    int result = value == NULL ? 1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return result != 0;
}

/* Return true if a tool's routine runs in this thread, possibly with another thread's control. */
static int is_in_routine(Interceptor* self) {
    PyObject* control = get_control(self);
    AmandaSwitches* switches = switches_of(self, &self->own, control);
    int inside = switches == NULL || switches->routine_depth != 0;
    Py_XDECREF(control);
    return inside;
}

int is_watching(Interceptor* self, PyObject* place) {
    if (!IS(place, forward)) return 0;
    AmandaSwitches* switches = switches_of(self, &self->owner, SLOT(place, forward, control));
    return switches != NULL && switches->enabled &&
           !is_true(get_state(self, names.quiet)) && !is_in_routine(self);
}

Idleness idleness(Interceptor* self, PyObject* place, PyObject* record) {
    AmandaSwitches* switches = switches_of(self, &self->owner, SLOT(place, forward, control));
    if (SLOT(record, record, marks) != Py_False || switches == NULL || !switches->caching) {
        return BUSY;
    }
    PyObject* session = SLOT(place, forward, session);
    PyObject* epoch = PyObject_GetAttr(session, names.epoch);
    Idleness found = BUSY;
    if (equal(epoch, SLOT(record, record, idle))) {
        if (!is_true(PyObject_GetAttr(session, names.wants_backward))) {
            found = ALONE;
        } else if (equal(epoch, SLOT(record, record, settled))) {
            found = SETTLED;
        } else {
            PyObject* no_tape = PyObject_CallNoArgs(self->no_tape);
            found = no_tape == Py_True ? ALONE : UNKNOWN;
            Py_XDECREF(no_tape);
        }
    }
    Py_XDECREF(epoch);
    return found;
}

PyObject* extended(PyObject* items, PyObject* name, PyObject* value) {
    Py_ssize_t count = items == Py_None ? 0 : PyTuple_GET_SIZE(items);
    PyObject* result = PyTuple_New(count + 2);
    if (result == NULL) return NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyTuple_SET_ITEM(result, index, Py_NewRef(PyTuple_GET_ITEM(items, index)));
    }
    PyTuple_SET_ITEM(result, count, Py_NewRef(name));
    PyTuple_SET_ITEM(result, count + 1, Py_NewRef(value));
    return result;
}

/* Return the offset of a slot of a Python class, or -1 with an exception set. */
static Py_ssize_t slot_of(PyObject* class, const char* name) {
    PyObject* slot = PyObject_GetAttrString(class, name);
    if (slot == NULL) return -1;
    Py_ssize_t offset = -1;
    if (Py_IS_TYPE(slot, &PyMemberDescr_Type) &&
        ((PyMemberDescrObject*)slot)->d_member->type == T_OBJECT_EX) {
        offset = ((PyMemberDescrObject*)slot)->d_member->offset;
    } else {
        PyErr_Format(PyExc_TypeError, "%R has no slot %s", class, name);
    }
    Py_DECREF(slot);
    return offset;
}

/* Return false, with an exception set, if the core has switches of another layout. Found at an
 * operator, that would only make it slower without a word. */
static int fits_the_core(Interceptor* self) {
    PyObject* control = get_control(self);
    if (control != NULL && switches_of(self, &self->own, control) == NULL && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "the state of a thread is not a Control");
    }
    Py_XDECREF(control);
    return !PyErr_Occurred();
}

static PyObject* interceptor_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    Interceptor* self = (Interceptor*)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    static char* keys[] = {
#define KEY(name) #name,
        HELD(KEY)
#undef KEY
        NULL,
    };
#define FORMAT(name) "O"
#define TARGET(name) , &self->name
    int parsed = PyArg_ParseTupleAndKeywords(
        args, keywords, "$" HELD(FORMAT) ":Interceptor", keys HELD(TARGET)
    );
#undef FORMAT
#undef TARGET
    /* The parsed references are borrowed, even if parsing failed. */
#define KEEP(name) Py_XINCREF(self->name);
    HELD(KEEP)
#undef KEEP
    if (!parsed) goto failed;
#define FIND(class, name) \
    self->class##_##name = slot_of(self->class, #name); \
    if (self->class##_##name < 0) goto failed;
    SLOTS(FIND)
#undef FIND
    if (!fits_the_core(self)) goto failed;
    return (PyObject*)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int interceptor_traverse(Interceptor* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
#define VISIT(name) Py_VISIT(self->name);
    HELD(VISIT)
#undef VISIT
    Py_VISIT(self->state_values);
    Py_VISIT(self->thread_values);
    Py_VISIT(self->owner.control);
    Py_VISIT(self->own.control);
    return 0;
}

static int interceptor_clear(Interceptor* self) {
#define CLEAR(name) Py_CLEAR(self->name);
    HELD(CLEAR)
#undef CLEAR
    Py_CLEAR(self->state_values);
    Py_CLEAR(self->thread_values);
    forget_switches(&self->owner);
    forget_switches(&self->own);
    return 0;
}

static void interceptor_dealloc(Interceptor* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    interceptor_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef interceptor_methods[] = {
    {"fast_path", (PyCFunction)(void (*)(void))interceptor_fast_path, METH_FASTCALL,
     "Replaces TFE_Py_FastPathExecute."},
    {"execute", (PyCFunction)(void (*)(void))interceptor_execute, METH_FASTCALL | METH_KEYWORDS,
     "Replaces execute.execute."},
    {"gradient_function", (PyCFunction)(void (*)(void))interceptor_gradient_function,
     METH_FASTCALL, "Replaces backprop._gradient_function."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot interceptor_slots[] = {
    {Py_tp_new, (void*)interceptor_new},
    {Py_tp_dealloc, (void*)interceptor_dealloc},
    {Py_tp_traverse, (void*)interceptor_traverse},
    {Py_tp_clear, (void*)interceptor_clear},
    {Py_tp_methods, interceptor_methods},
    {Py_tp_doc, (void*)"Executes ops without actions in C."},
    {0, NULL},
};

static PyType_Spec interceptor_spec = {
    .name = "amanda_driver_tf._native.Interceptor",
    .basicsize = sizeof(Interceptor),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = interceptor_slots,
};

int add_interceptor(PyObject* module) {
#define INTERN(name) \
    if (names.name == NULL && (names.name = PyUnicode_InternFromString(#name)) == NULL) return -1;
    NAMES(INTERN)
#undef INTERN
    PyObject* type = PyType_FromModuleAndSpec(module, &interceptor_spec, NULL);
    if (type == NULL) return -1;
    int failed = PyModule_AddType(module, (PyTypeObject*)type);
    Py_DECREF(type);
    return failed;
}
