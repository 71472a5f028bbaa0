/* The replacement of `execute.execute`, to which ops fall back. */
#include "amanda_identity.h"
#include "interceptor.h"

/* Return the record of the op that fell back last, if this op is executed now. New, or NULL. */
static PyObject* taken(Interceptor* self, PyObject* fallbacks, PyObject* op_name) {
    Py_ssize_t count = PyList_GET_SIZE(fallbacks);
    if (count == 0 || !PyBytes_CheckExact(op_name)) return NULL;
    PyObject* call = PyList_GET_ITEM(fallbacks, count - 1);
    PyObject* record = PyTuple_GET_ITEM(call, 2);
    /* The frame of the op's generated wrapper, which called its fallback function. */
    AmandaFrame* frame = amanda_innermost_frame(PyThreadState_Get());
    if (frame != NULL) frame = amanda_frame_back(frame);
    if (frame == NULL || amanda_frame_object(frame) == NULL || !IS(record, record) ||
        PyLong_AsVoidPtr(PyTuple_GET_ITEM(call, 1)) != (void*)amanda_frame_object(frame) ||
        PyUnicode_CompareWithASCIIString(
            PyTuple_GET_ITEM(call, 0), PyBytes_AS_STRING(op_name)
        ) != 0) {
        return NULL;
    }
    Py_INCREF(record);
    return record;
}

/* Return an argument of `execute`, given by position or by name. Borrowed, or NULL. */
static PyObject* argument(
    PyObject* const* args, Py_ssize_t count, PyObject* keywords, Py_ssize_t position, PyObject* name
) {
    if (position < count) return args[position];
    Py_ssize_t named = keywords == NULL ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t index = 0; index < named; index++) {
        if (PyTuple_GET_ITEM(keywords, index) == name) return args[count + index];
    }
    return NULL;
}

/* Return true if the caller will ask whether to record the op: `intercept._asks_to_record`. */
static int asks_to_record(void) {
    AmandaFrame* caller = amanda_innermost_frame(PyThreadState_Get());
    PyObject* called = caller == NULL ? NULL : amanda_frame_code(caller)->co_names;
    Py_ssize_t count = called == NULL ? 0 : PyTuple_GET_SIZE(called);
    for (Py_ssize_t index = 0; index < count; index++) {
        if (PyTuple_GET_ITEM(called, index) == names.must_record_gradient) return 1;
    }
    return 0;
}

/* Record an execution on the tapes, with its record attached: `originals.record_gradient`. */
static int record_on_tapes(
    Interceptor* self, PyObject* record, PyObject* inputs, PyObject* attrs, PyObject* outputs
) {
    PyObject* op_type = SLOT(record, record, op_type);
    PyObject* paired = extended(attrs, self->pair, record);
    PyObject* tell = PyObject_GetAttr(self->module, names.record_gradient);
    PyObject* returned = NULL;
    if (paired != NULL && tell != NULL) {
        PyObject* name = SLOT(op_type, op_type, name);
        returned = PyObject_CallFunctionObjArgs(tell, name, inputs, paired, outputs, NULL);
    }
    Py_XDECREF(paired);
    Py_XDECREF(tell);
    if (returned == NULL) return -1;
    Py_DECREF(returned);
    return set_state(self, names.is_recorded, Py_True);
}

/* Arguments: op_name, num_outputs, inputs, attrs, ctx, name; the last four possibly by name. */
PyObject* interceptor_execute(
    PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* keywords
) {
    Interceptor* self = (Interceptor*)object;
    PyObject *result = NULL, *fallbacks = NULL, *record = NULL;
    PyObject* place = get_state(self, names.eager);
    if (place == Py_None && !is_true(get_state(self, names.unattached))) {
        if (set_state(self, names.is_recorded, Py_False) < 0) goto done;
        result = PyObject_Vectorcall(self->execute, args, (size_t)count, keywords);
        goto done;
    }
    if (place == NULL || count == 0 || !is_watching(self, place)) goto otherwise;
    fallbacks = get_state(self, names.fallbacks);
    if (fallbacks == NULL || !PyList_CheckExact(fallbacks)) goto otherwise;
    record = taken(self, fallbacks, args[0]);
    if (record == NULL) goto otherwise;
    PyObject* op_type = SLOT(record, record, op_type);
    if (!IS(op_type, op_type) || PyLong_AsLong(SLOT(op_type, op_type, kind)) != PLAIN) {
        goto otherwise;
    }
    Idleness idle = idleness(self, place, record);
    PyObject* inputs = argument(args, count, keywords, 2, names.inputs);
    PyObject* attrs = argument(args, count, keywords, 3, names.attrs);
    if ((idle != ALONE && idle != SETTLED) || inputs == NULL || attrs == NULL ||
        (attrs != Py_None && !PyTuple_CheckExact(attrs)) || PyErr_Occurred()) {
        goto otherwise;
    }
    Py_ssize_t left = PyList_GET_SIZE(fallbacks) - 1;
    if (set_state(self, names.is_recorded, Py_False) < 0 ||
        PyList_SetSlice(fallbacks, left, left + 1, NULL) < 0) {
        goto done;
    }
    result = PyObject_Vectorcall(self->execute, args, (size_t)count, keywords);
    if (result != NULL && idle == SETTLED && asks_to_record() &&
        record_on_tapes(self, record, inputs, attrs, result) < 0) {
        Py_CLEAR(result);
    }
    goto done;
otherwise:
    PyErr_Clear();
    result = PyObject_Vectorcall(self->slow_execute, args, (size_t)count, keywords);
done:
    Py_XDECREF(place);
    Py_XDECREF(fallbacks);
    Py_XDECREF(record);
    return result;
}
