/* Marks: an op of TensorFlow that records when it ran, without Python.
 *
 * The op and its kernel are registered by TensorFlow's C API, whose functions Python passes by
 * address, so that the extension needs neither headers nor libraries of TensorFlow. A kernel finds
 * its journal by number, because nodes may outlive it. */
#include "parts.h"

#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#if defined(__linux__)

typedef struct {
    int64_t number, time, thread;
} Mark;

typedef struct {
    PyObject_HEAD
    int64_t number;
    size_t count, capacity;
    size_t warned; /* The count at which Python was told last that many marks wait. */
    Mark* marks;
} Journal;

typedef struct {
    int64_t journal, number;
} Kernel;

enum { LIMIT = 1 << 16 };

static PyThread_type_lock lock;
/* Journals by number; NULL for those that are gone. */
static Journal** journals;
static int64_t journals_made, journals_capacity;
/* Called with the number of a journal in which many marks wait. */
static PyObject* full;

/* TensorFlow's C API. */
static struct {
    void* (*NewStatus)(void);
    void (*DeleteStatus)(void*);
    int (*GetCode)(const void*);
    void* (*NewOpDefinitionBuilder)(const char*);
    void (*OpDefinitionBuilderAddAttr)(void*, const char*);
    void (*OpDefinitionBuilderAddInput)(void*, const char*);
    void (*OpDefinitionBuilderSetIsStateful)(void*, _Bool);
    void (*OpDefinitionBuilderSetShapeInferenceFunction)(void*, void (*)(void*, void*));
    void (*RegisterOpDefinition)(void*, void*);
    void* (*NewKernelBuilder)(const char*, const char*, void* (*)(void*), void (*)(void*, void*),
                              void (*)(void*));
    void (*RegisterKernelBuilder)(const char*, void*, void*);
    void (*OpKernelConstruction_GetAttrInt64)(void*, const char*, int64_t*, void*);
} tf;

static void infer_nothing(void* Py_UNUSED(context), void* Py_UNUSED(status)) {}

static void* kernel_new(void* construction) {
    Kernel* self = malloc(sizeof(Kernel));
    if (self == NULL) return NULL;
    void* status = tf.NewStatus();
    tf.OpKernelConstruction_GetAttrInt64(construction, "journal", &self->journal, status);
    tf.OpKernelConstruction_GetAttrInt64(construction, "number", &self->number, status);
    tf.DeleteStatus(status);
    return self;
}

static void kernel_delete(void* self) { free(self); }

/* Add a mark; return true if Python should take the marks. */
static int add(Journal* journal, int64_t number) {
    struct timespec now;
    if (journal->count == journal->capacity) {
        size_t capacity = journal->capacity ? 2 * journal->capacity : 1024;
        Mark* marks = realloc(journal->marks, capacity * sizeof(Mark));
        if (marks == NULL) return 0;
        journal->marks = marks;
        journal->capacity = capacity;
    }
    Mark* mark = journal->marks + journal->count++;
    mark->number = number;
    mark->thread = (int64_t)PyThread_get_thread_ident();
    clock_gettime(CLOCK_MONOTONIC, &now);
    mark->time = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (journal->count < journal->warned + LIMIT) return 0;
    journal->warned = journal->count;
    return 1;
}

static void kernel_compute(void* kernel, void* Py_UNUSED(context)) {
    Kernel* self = kernel;
    int many = 0;
    if (self == NULL) return;
    PyThread_acquire_lock(lock, WAIT_LOCK);
    if (journals[self->journal] != NULL) many = add(journals[self->journal], self->number);
    PyThread_release_lock(lock);
    if (!many) return;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject* done = PyObject_CallFunction(full, "L", (long long)self->journal);
    if (done == NULL) PyErr_WriteUnraisable(full);
    Py_XDECREF(done);
    PyGILState_Release(state);
}

static PyObject* journal_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
    static char* names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "", names)) return NULL;
    Journal* self = (Journal*)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    PyThread_acquire_lock(lock, WAIT_LOCK);
    if (journals_made == journals_capacity) {
        int64_t capacity = journals_capacity ? 2 * journals_capacity : 16;
        Journal** found = realloc(journals, (size_t)capacity * sizeof(Journal*));
        if (found == NULL) {
            PyThread_release_lock(lock);
            self->number = -1;
            Py_DECREF(self);
            return PyErr_NoMemory();
        }
        journals = found;
        journals_capacity = capacity;
    }
    self->number = journals_made++;
    journals[self->number] = self;
    PyThread_release_lock(lock);
    return (PyObject*)self;
}

static void journal_dealloc(Journal* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyThread_acquire_lock(lock, WAIT_LOCK);
    if (self->number >= 0) journals[self->number] = NULL;
    PyThread_release_lock(lock);
    free(self->marks);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject* journal_call(Journal* self, PyObject* arguments, PyObject* keywords) {
    static char* names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "", names)) return NULL;
    PyThread_acquire_lock(lock, WAIT_LOCK);
    Mark* marks = self->marks;
    size_t count = self->count;
    self->marks = NULL;
    self->count = self->capacity = self->warned = 0;
    PyThread_release_lock(lock);
    PyObject* taken = PyBytes_FromStringAndSize((char*)marks, (Py_ssize_t)(count * sizeof(Mark)));
    free(marks);
    return taken;
}

static PyObject* journal_number(Journal* self, void* Py_UNUSED(closure)) {
    return PyLong_FromLongLong(self->number);
}

static PyGetSetDef journal_attributes[] = {
    {"number", (getter)journal_number, NULL, "By which nodes find it.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot journal_slots[] = {
    {Py_tp_new, (void*)journal_new},
    {Py_tp_dealloc, (void*)journal_dealloc},
    {Py_tp_call, (void*)journal_call},
    {Py_tp_getset, (void*)journal_attributes},
    {Py_tp_doc, (void*)"Marks that nodes record; a call returns them and forgets them."},
    {0, NULL},
};

static PyType_Spec journal_spec = {
    .name = "amanda_driver_tf._native.Journal",
    .basicsize = sizeof(Journal),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = journal_slots,
};

static int failed(void* status) {
    int code = tf.GetCode(status);
    tf.DeleteStatus(status);
    if (code) PyErr_Format(PyExc_RuntimeError, "TensorFlow refused the op of marks: code %d", code);
    return code;
}

/* Register the op and its kernel: register_marks(name, full, addresses of `tf`'s functions). */
static PyObject* register_marks(PyObject* Py_UNUSED(module), PyObject* arguments) {
    const char* name;
    PyObject *callback, *addresses;
    if (!PyArg_ParseTuple(arguments, "sOO!", &name, &callback, &PyTuple_Type, &addresses)) {
        return NULL;
    }
    void** functions = (void**)&tf;
    Py_ssize_t count = (Py_ssize_t)(sizeof(tf) / sizeof(void*));
    if (PyTuple_GET_SIZE(addresses) != count) {
        PyErr_SetString(PyExc_ValueError, "a wrong number of addresses");
        return NULL;
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        functions[index] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, index));
        if (functions[index] == NULL) return NULL;
    }
    Py_INCREF(callback);
    Py_XSETREF(full, callback);
    void* op = tf.NewOpDefinitionBuilder(name);
    tf.OpDefinitionBuilderAddAttr(op, "journal: int");
    tf.OpDefinitionBuilderAddAttr(op, "number: int");
    /* What the node waits for. Control edges would do, but let TensorFlow remove what it reads. */
    tf.OpDefinitionBuilderAddAttr(op, "Tin: list(type) >= 0");
    tf.OpDefinitionBuilderAddInput(op, "input: Tin");
    tf.OpDefinitionBuilderSetIsStateful(op, 1);
    tf.OpDefinitionBuilderSetShapeInferenceFunction(op, infer_nothing);
    void* status = tf.NewStatus();
    tf.RegisterOpDefinition(op, status);
    if (failed(status)) return NULL;
    const char* devices[] = {"CPU", "GPU"};
    for (int index = 0; index < 2; index++) {
        void* kernel =
            tf.NewKernelBuilder(name, devices[index], kernel_new, kernel_compute, kernel_delete);
        status = tf.NewStatus();
        tf.RegisterKernelBuilder(name, kernel, status);
        if (failed(status)) return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"register_marks", register_marks, METH_VARARGS, "Register the op that records marks."},
    {NULL, NULL, 0, NULL},
};

int add_marks(PyObject* module) {
    if (lock == NULL) lock = PyThread_allocate_lock();
    if (lock == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject* type = PyType_FromModuleAndSpec(module, &journal_spec, NULL);
    if (type == NULL) return -1;
    int status = PyModule_AddType(module, (PyTypeObject*)type);
    Py_DECREF(type);
    return status < 0 ? -1 : PyModule_AddFunctions(module, functions);
}

#else

/* Elsewhere Python's clock is another one, and marks are recorded by Python. */
int add_marks(PyObject* Py_UNUSED(module)) { return 0; }

#endif
