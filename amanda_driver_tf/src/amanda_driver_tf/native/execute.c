/* What stands for `execute.execute`, to which ops fall back. */
#include "frames.h"
#include "interceptor.h"

/* The record of the op that fell back last, if it is the one that is executed. New, or NULL. */
static PyObject* taken(Interceptor* self, PyObject* handed, PyObject* op_name) {
    Py_ssize_t count = PyList_GET_SIZE(handed);
    if (count == 0 || !PyBytes_CheckExact(op_name)) return NULL;
    PyObject* call = PyList_GET_ITEM(handed, count - 1);
    PyObject* record = PyTuple_GET_ITEM(call, 2);
    /* The op's own function, which called the one for its fallback. */
    Frame* frame = innermost();
    if (frame != NULL) frame = back(frame);
    if (frame == NULL || object_of(frame) == NULL || !IS(record, record) ||
        PyLong_AsVoidPtr(PyTuple_GET_ITEM(call, 1)) != (void*)object_of(frame) ||
        PyUnicode_CompareWithASCIIString(
            PyTuple_GET_ITEM(call, 0), PyBytes_AS_STRING(op_name)
        ) != 0) {
        return NULL;
    }
    Py_INCREF(record);
    return record;
}

/* Called with op_name, num_outputs, inputs, attrs, ctx, name; from the third on by name or not. */
PyObject* interceptor_execute(
    PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* keywords
) {
    Interceptor* self = (Interceptor*)object;
    PyObject *result = NULL, *handed = NULL, *record = NULL;
    PyObject* place = PyObject_GetAttr(self->state, names.eager);
    if (place == Py_None) {
        if (PyObject_SetAttr(self->state, names.told, Py_False) < 0) goto done;
        result = PyObject_Vectorcall(self->execute, args, (size_t)count, keywords);
        goto done;
    }
    if (place == NULL || count == 0 || !is_watching(self, place)) goto otherwise;
    handed = PyObject_GetAttr(self->state, names.handed);
    if (handed == NULL || !PyList_CheckExact(handed)) goto otherwise;
    record = taken(self, handed, args[0]);
    if (record == NULL) goto otherwise;
    int pair = 0;
    PyObject* op_type = SLOT(record, record, op_type);
    /* Where a tape records it is told in Python. */
    if (!IS(op_type, op_type) || PyLong_AsLong(SLOT(op_type, op_type, kind)) != PLAIN ||
        !is_idle(self, place, record, &pair) || pair || PyErr_Occurred()) {
        goto otherwise;
    }
    Py_ssize_t left = PyList_GET_SIZE(handed) - 1;
    if (PyObject_SetAttr(self->state, names.told, Py_False) < 0 ||
        PyList_SetSlice(handed, left, left + 1, NULL) < 0) {
        goto done;
    }
    result = PyObject_Vectorcall(self->execute, args, (size_t)count, keywords);
    goto done;
otherwise:
    PyErr_Clear();
    result = PyObject_Vectorcall(self->slow_execute, args, (size_t)count, keywords);
done:
    Py_XDECREF(place);
    Py_XDECREF(handed);
    Py_XDECREF(record);
    return result;
}
