/* The replacement of `backprop._gradient_function`, which tapes call for an op's gradient. */
#include "interceptor.h"

/* Positions of arguments. */
enum { ATTRS = 1, SKIP = 6 };

/* Return the record stored on the tape with an op: `backward._partner`. Borrowed, or NULL. */
static PyObject* partner(Interceptor* self, PyObject* attrs) {
    /* From the end, where it is unless TensorFlow appends something. By identity, since comparing
     * attributes is expensive. */
    for (Py_ssize_t index = PyTuple_GET_SIZE(attrs) - 2; index >= 0; index -= 2) {
        if (PyTuple_GET_ITEM(attrs, index) == self->pair) return PyTuple_GET_ITEM(attrs, index + 1);
    }
    return NULL;
}

/* Return true if the gradient of an op has no actions: `backward._is_settled`. */
static int is_settled(Interceptor* self, PyObject* place, PyObject* record, PyObject* skip) {
    AmandaSwitches* switches = switches_of(self, &self->owner, SLOT(place, place, control));
    PyObject* session = SLOT(place, place, session);
    if (switches == NULL || session == NULL || !switches->caching || !equal(SLOT(record, record, skip), skip)) {
        return 0;
    }
    PyObject* epoch = PyObject_GetAttr(session, names.epoch);
    int settled = equal(epoch, SLOT(record, record, settled));
    Py_XDECREF(epoch);
    if (!settled) return 0;
    PyObject* no_tape = PyObject_CallNoArgs(self->no_tape);
    settled = no_tape == Py_True;
    Py_XDECREF(no_tape);
    return settled;
}

/* Store the record on a gradient: 1 if that was possible, 0 if not, -1 on an error. */
static int mark_one(PyObject* result, PyObject* record) {
    if (result == Py_None) return 1;
    PyObject* source = PyObject_GetAttr(result, names._amanda_source);
    if (source == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
    }
    /* The gradient may be a tensor marked as the value of a variable. */
    int kept = source != NULL && PyLong_CheckExact(source);
    Py_XDECREF(source);
    if (kept || PyObject_SetAttr(result, names._amanda_source, record) == 0) return 1;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    return 0;
}

/* Store the record on all gradients: `taped.mark`. -1 on an error. */
static int mark(PyObject* results, PyObject* record) {
    if (!PyList_Check(results) && !PyTuple_Check(results)) {
        return mark_one(results, record) < 0 ? -1 : 0;
    }
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(results); index++) {
        int marked = mark_one(PySequence_Fast_GET_ITEM(results, index), record);
        if (marked <= 0) return marked;
    }
    return 0;
}

PyObject* interceptor_gradient_function(
    PyObject* object, PyObject* const* args, Py_ssize_t count
) {
    Interceptor* self = (Interceptor*)object;
    PyObject* record = NULL;
    PyObject* result = NULL;
    PyObject* place = get_state(self, names.eager);
    if (place == NULL) return NULL;
    if (place == Py_None) {
        Py_DECREF(place);
        return PyObject_Vectorcall(self->gradient_function, args, (size_t)count, NULL);
    }
    if (count <= SKIP || !PyTuple_CheckExact(args[ATTRS]) ||
        !PyObject_TypeCheck(place, (PyTypeObject*)self->place)) {
        goto otherwise;
    }
    record = partner(self, args[ATTRS]);
    if (!IS(record, record) || !is_settled(self, place, record, args[SKIP]) || PyErr_Occurred()) {
        goto otherwise;
    }
    if (set_state(self, names.eager, Py_None) < 0) goto done;
    result = PyObject_Vectorcall(self->gradient_function, args, (size_t)count, NULL);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (set_state(self, names.eager, place) < 0) {
        Py_CLEAR(result);
    } else if (result != NULL && mark(result, record) < 0) {
        Py_CLEAR(result);
    }
    if (type != NULL) PyErr_Restore(type, value, traceback);
    goto done;
otherwise:
    PyErr_Clear();
    result = PyObject_Vectorcall(self->slow_gradient_function, args, (size_t)count, NULL);
done:
    Py_DECREF(place);
    return result;
}
