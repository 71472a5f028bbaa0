/* Finds the record of an op that follows the same op as last time.
 *
 * Owns the comparison with the expected record. `identity/sites.py` finds records in all other cases.
 */
#include "amanda_identity.h"
#include "interceptor.h"
#include "parts.h"

int holds_no_variable(PyObject* value) {
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
           PyFloat_CheckExact(value) || PyComplex_CheckExact(value) || PyUnicode_CheckExact(value) ||
           PyBytes_CheckExact(value) || PyList_CheckExact(value) || PyTuple_CheckExact(value);
}

/* Return `_amanda_source`, which identifies a tensor if it is an int. New, or NULL. */
static PyObject* source_of(Interceptor* self, PyObject* value, int* is_handle) {
    if (IS(value, tensor)) return PyObject_GetAttr(value, names._amanda_source);
    PyObject* handle = PyObject_CallOneArg(self->handle_of, value);
    if (handle == NULL || handle == Py_None) return handle;
    *is_handle = 1;
    PyObject* source = PyObject_GetAttr(handle, names._amanda_source);
    Py_DECREF(handle);
    return source;
}

static int contains(PyObject* set, Py_ssize_t number) {
    if (PySet_GET_SIZE(set) == 0) return 0;
    PyObject* key = PyLong_FromSsize_t(number);
    int found = key == NULL ? -1 : PySet_Contains(set, key);
    Py_XDECREF(key);
    return found;
}

/* Return true if the operands of a call are those of a record, as by `rules.operands_of`. */
static int has_operands(
    Interceptor* self, PyObject* record, PyObject* op_type, int inside, PyObject* const* args,
    Py_ssize_t count
) {
    PyObject* operands = SLOT(record, record, operands);
    Py_ssize_t inputs = PyLong_AsSsize_t(SLOT(op_type, op_type, count));
    Py_ssize_t met = 0;
    for (Py_ssize_t position = 0; position < inputs && position < count; position++) {
        PyObject* value = args[position];
        if (holds_no_variable(value)) continue;
        int is_handle = 0;
        PyObject* source = source_of(self, value, &is_handle);
        if (source == NULL) return 0;
        if (!PyLong_CheckExact(source)) {
            Py_DECREF(source);
            /* Python gives a token to a handle without one. */
            if (is_handle || contains(SLOT(op_type, op_type, handles), position)) return 0;
            continue;
        }
        long long token = PyLong_AsLongLong(source);
        Py_DECREF(source);
        if (is_handle) {
            if (token <= 0) return 0;
        } else if (!amanda_distinguishes(token, position, inside)) {
            continue;
        }
        if (met >= PyTuple_GET_SIZE(operands)) return 0;
        PyObject* operand = PyTuple_GET_ITEM(operands, met++);
        if (PyLong_AsSsize_t(PyTuple_GET_ITEM(operand, 0)) != position ||
            PyLong_AsLongLong(PyTuple_GET_ITEM(operand, 1)) != token) {
            return 0;
        }
    }
    return met == PyTuple_GET_SIZE(operands);
}

/* Return the record that followed the last op the last time. New, or NULL. */
static PyObject* follower(Interceptor* self, PyObject* place, PyObject* activation, PyObject* scope) {
    PyObject* last = SLOT(activation, activation, last);
    PyObject* next = NULL;
    if (IS(last, record)) {
        next = SLOT(last, record, next);
        Py_XINCREF(next);
    } else {
        PyObject* sites = PyObject_GetAttr(SLOT(place, forward, program), names.sites);
        PyObject* firsts = sites == NULL ? NULL : PyObject_GetAttr(sites, names.firsts);
        if (firsts != NULL) next = PyObject_GetItem(firsts, SLOT(scope, scope, number));
        Py_XDECREF(firsts);
        Py_XDECREF(sites);
    }
    return next;
}

PyObject* located(
    Interceptor* self, PyObject* place, PyObject* activation, PyObject* op_type,
    PyObject* const* args, Py_ssize_t count, PyObject** passed
) {
    PyObject* scope = SLOT(activation, activation, scope);
    if (!IS(scope, scope)) return NULL;
    int inside = PyObject_IsTrue(SLOT(scope, scope, root));
    PyObject* expected = follower(self, place, activation, scope);
    if (!IS(expected, record) || SLOT(expected, record, op_type) != op_type ||
        !IS(SLOT(expected, record, call_site), call_site) ||
        !has_operands(self, expected, op_type, inside, args, count) ||
        !is_call_site_here(SLOT(expected, record, call_site), 0)) {
        goto unknown;
    }
    if (inside) {
        PyObject* counts = SLOT(activation, activation, counts);
        PyObject* before = PyDict_GetItemWithError(counts, SLOT(expected, record, group));
        long number = before == NULL ? 0 : PyLong_AsLong(before);
        if (number != PyLong_AsLong(SLOT(expected, record, occurrence))) goto unknown;
        *passed = PyLong_FromLong(number + 1);
        if (*passed == NULL) goto unknown;
    }
    return expected;
unknown:
    Py_XDECREF(expected);
    return NULL;
}

PyObject* read_of(
    Interceptor* self, PyObject* place, PyObject* activation, PyObject* op_type,
    PyObject* const* args, Py_ssize_t count
) {
    PyObject* scope = SLOT(activation, activation, scope);
    if (count == 0 || !IS(scope, scope)) return NULL;
    PyObject* record = NULL;
    PyObject* token = PyObject_GetAttr(args[0], names._amanda_source);
    if (token == NULL || !PyLong_CheckExact(token)) {
        Py_XDECREF(token);
        return NULL;
    }
    PyObject* key =
        PyTuple_Pack(3, SLOT(scope, scope, number), SLOT(op_type, op_type, name), token);
    PyObject* sites = PyObject_GetAttr(SLOT(place, forward, program), names.sites);
    PyObject* reads = sites == NULL ? NULL : PyObject_GetAttr(sites, names.reads);
    if (key != NULL && reads != NULL) record = PyObject_GetItem(reads, key);
    Py_XDECREF(reads);
    Py_XDECREF(sites);
    Py_XDECREF(key);
    Py_DECREF(token);
    return record;
}
