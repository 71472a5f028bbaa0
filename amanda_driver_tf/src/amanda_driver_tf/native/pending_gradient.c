/* Whether an op may skip Python though its gradient is not known yet: `intercept._may_wait`. */
#include "interceptor.h"

/* As in `intercept`: after how many recorded executions the gradient of an op is analysed. */
#define WAITED 2

/* Append the tensors in an argument; return 1 if it contains a variable, -1 on an error. */
static int collect(Interceptor* self, PyObject* value, PyObject* tensors) {
    if (IS(value, tensor)) return PyList_Append(tensors, value);
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
        for (Py_ssize_t index = 0; index < count; index++) {
            PyObject* item = PySequence_Fast_GET_ITEM(value, index);
            if (PyList_CheckExact(item) || PyTuple_CheckExact(item)) continue;
            int holds = collect(self, item, tensors);
            if (holds != 0) return holds;
        }
        return 0;
    }
    if (holds_no_variable(value)) return 0;
    PyObject* handle = PyObject_CallOneArg(self->handle_of, value);
    if (handle == NULL) return -1;
    int holds = handle != Py_None;
    Py_DECREF(handle);
    return holds;
}

/* Return true if a tape records a call, or on an error: `intercept._is_recorded`. */
static int is_recorded(
    Interceptor* self, PyObject* op_type, PyObject* const* args, Py_ssize_t count
) {
    Py_ssize_t inputs = PyLong_AsSsize_t(SLOT(op_type, op_type, count));
    PyObject* tensors = PyList_New(0);
    int found = tensors == NULL ? -1 : 0;
    for (Py_ssize_t position = 0; position < inputs && position < count && !found; position++) {
        found = collect(self, args[position], tensors);
    }
    if (!found) {
        PyObject* recorded = PyObject_CallOneArg(self->recorded, tensors);
        found = recorded == NULL ? -1 : recorded != Py_False;
        Py_XDECREF(recorded);
    }
    Py_XDECREF(tensors);
    return found != 0;
}

/* Return true if the gradient has actions in this epoch. */
static int is_planned(Interceptor* self, PyObject* record, PyObject* epoch) {
    PyObject* children = SLOT(record, record, children);
    PyObject *key, *child;
    Py_ssize_t position = 0;
    if (children == NULL || !PyDict_CheckExact(children)) return 1;
    while (PyDict_Next(children, &position, &key, &child)) {
        if (!IS(child, record) || equal(epoch, SLOT(child, record, planned))) return 1;
    }
    return 0;
}

int may_wait(
    Interceptor* self, PyObject* place, PyObject* record, PyObject* op_type,
    PyObject* const* args, Py_ssize_t count
) {
    if (!is_recorded(self, op_type, args, count)) return 1;
    long waited = PyLong_AsLong(SLOT(record, record, waited));
    if (waited < WAITED) return 0; /* Python counts the executions. */
    PyObject* epoch = PyObject_GetAttr(SLOT(place, forward, session), names.epoch);
    int planned = epoch == NULL || is_planned(self, record, epoch);
    Py_XDECREF(epoch);
    return !planned;
}
