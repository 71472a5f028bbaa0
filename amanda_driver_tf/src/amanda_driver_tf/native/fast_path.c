/* The replacement of `TFE_Py_FastPathExecute`, which every op calls first. */
#include "interceptor.h"

/* As in `intercept`: how many ops that fell back are kept at most. */
#define MOST_FALLBACKS 8

static PyObject* call_original(
    Interceptor* self, PyObject* const* args, Py_ssize_t count, PyObject* record
) {
    if (record == NULL) return PyObject_Vectorcall(self->fast_path, args, (size_t)count, NULL);
    PyObject* more = PyTuple_New(count + 2);
    if (more == NULL) return NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_INCREF(args[index]);
        PyTuple_SET_ITEM(more, index, args[index]);
    }
    Py_INCREF(self->pair);
    PyTuple_SET_ITEM(more, count, self->pair);
    Py_INCREF(record);
    PyTuple_SET_ITEM(more, count + 1, record);
    PyObject* result = PyObject_Call(self->fast_path, more, NULL);
    Py_DECREF(more);
    return result;
}

/* Store the op that falls back, for the call of `execute` that follows: `intercept._store_fallback`. */
static int store_fallback(Interceptor* self, PyObject* op_type, int kind, PyObject* record) {
    int failed = -1;
    PyObject* fallbacks = get_state(self, names.fallbacks);
    PyObject* execute = PyObject_GetAttr(self->module, names.execute);
    PyObject* frame = (PyObject*)PyEval_GetFrame();
    if (fallbacks == NULL || execute == NULL) goto done;
    if (frame == NULL) {
        failed = 0; /* Called from C, so there is no fallback. */
    } else if (
        kind == PLAIN && PyCFunction_CheckExact(execute) &&
        PyCFunction_GET_SELF(execute) == (PyObject*)self && PyList_CheckExact(fallbacks) &&
        PyList_GET_SIZE(fallbacks) < MOST_FALLBACKS
    ) {
        PyObject* call =
            Py_BuildValue("(ONO())", SLOT(op_type, op_type, name), PyLong_FromVoidPtr(frame), record);
        if (call != NULL) failed = PyList_Append(fallbacks, call);
        Py_XDECREF(call);
    } else {
        PyObject* returned = PyObject_CallFunctionObjArgs(self->fell_back, op_type, record, NULL);
        if (returned != NULL) failed = 0;
        Py_XDECREF(returned);
    }
done:
    Py_XDECREF(fallbacks);
    Py_XDECREF(execute);
    return failed;
}

static PyObject* execute_idle(
    Interceptor* self, PyObject* op_type, int kind, PyObject* record, int pair,
    PyObject* const* args, Py_ssize_t count
) {
    PyObject* result = call_original(self, args, count, pair ? record : NULL);
    if (result == NULL && PyErr_ExceptionMatches(self->fallback)) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (store_fallback(self, op_type, kind, record) < 0) {
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(traceback);
        } else {
            PyErr_Restore(type, value, traceback);
        }
    } else if (result != NULL && kind == READ &&
               PyObject_SetAttr(result, names._amanda_source, SLOT(record, record, token)) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* Arguments: ctx, op_name, name, *args. */
PyObject* interceptor_fast_path(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    Interceptor* self = (Interceptor*)object;
    PyObject *result = NULL, *activation = NULL, *op_type = NULL, *record = NULL, *passed = NULL;
    PyObject* place = get_state(self, names.eager);
    if (place == NULL) return NULL;
    if (place == Py_None && !is_true(get_state(self, names.unattached))) {
        Py_DECREF(place);
        return call_original(self, args, count, NULL);
    }
    /* Python attaches a session to the thread if one is meant for it. */
    if (count < 3 || place == Py_None || !is_watching(self, place)) goto otherwise;
    PyObject* activations = SLOT(place, forward, activations);
    if (activations == NULL || !PyList_CheckExact(activations)) goto otherwise;
    activation = PyList_GetItem(activations, PyList_GET_SIZE(activations) - 1);
    Py_XINCREF(activation);
    op_type = PyObject_CallOneArg(self->op_type_of, args[1]);
    if (!IS(activation, activation) || !IS(op_type, op_type)) goto otherwise;
    long kind = PyLong_AsLong(SLOT(op_type, op_type, kind));
    if (kind == READ) {
        record = read_of(self, place, activation, op_type, args + 3, count - 3);
    } else if (kind == PLAIN) {
        record = located(self, place, activation, op_type, args + 3, count - 3, &passed);
    }
    if (!IS(record, record)) goto otherwise;
    int watched = kind == READ || SLOT(record, record, watched) == Py_True;
    Idleness idle = watched ? idleness(self, place, record) : ALONE;
    if (idle == BUSY ||
        (idle == UNKNOWN &&
         !may_wait(self, place, record, op_type, args + 3, count - 3)) ||
        PyErr_Occurred()) {
        goto otherwise;
    }
    /* From here on the state is changed, so Python must not see the op again. */
    if (passed != NULL && PyDict_SetItem(SLOT(activation, activation, counts),
                                         SLOT(record, record, group), passed) < 0) {
        goto done;
    }
    if (kind == PLAIN) {
        PyObject* last = SLOT(activation, activation, last);
        SLOT(activation, activation, last) = Py_NewRef(record);
        Py_XDECREF(last);
    }
    if (watched) {
        result = execute_idle(self, op_type, (int)kind, record, idle != ALONE, args, count);
    } else {
        result = call_original(self, args, count, NULL);
    }
    goto done;
otherwise:
    PyErr_Clear();
    result = PyObject_Vectorcall(self->slow_fast_path, args, (size_t)count, NULL);
done:
    Py_DECREF(place);
    Py_XDECREF(activation);
    Py_XDECREF(op_type);
    Py_XDECREF(record);
    Py_XDECREF(passed);
    return result;
}
