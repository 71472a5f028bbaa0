/* Fast access to the thread-local objects `STATE` and `THREAD`, and to a thread's switches.
 *
 * `threading.local` looks up the thread's dictionary at each access, which took as long as
 * everything else at an op. Here the dictionaries of the last thread are cached.
 */
#include "interceptor.h"

/* Ids of threads are never reused, and never 0. Returns -1 with an exception set on an error. */
static int take_dictionaries(Interceptor* self) {
    uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
    if (self->thread_number == thread) return 0;
    self->thread_number = 0;
    Py_XSETREF(self->state_values, PyObject_GetAttrString(self->state, "__dict__"));
    Py_XSETREF(self->thread_values, PyObject_GetAttrString(self->thread, "__dict__"));
    if (self->state_values == NULL || self->thread_values == NULL) return -1;
    if (!PyDict_CheckExact(self->state_values) || !PyDict_CheckExact(self->thread_values)) {
        PyErr_SetString(PyExc_TypeError, "the state of a thread is not kept in a dictionary");
        return -1;
    }
    self->thread_number = thread;
    return 0;
}

static PyObject* value_of(PyObject* values, PyObject* name) {
    PyObject* value = PyDict_GetItemWithError(values, name);
    if (value == NULL && !PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, name);
    Py_XINCREF(value);
    return value;
}

PyObject* get_state(Interceptor* self, PyObject* name) {
    return take_dictionaries(self) < 0 ? NULL : value_of(self->state_values, name);
}

int set_state(Interceptor* self, PyObject* name, PyObject* value) {
    return take_dictionaries(self) < 0 ? -1 : PyDict_SetItem(self->state_values, name, value);
}

PyObject* get_control(Interceptor* self) {
    return take_dictionaries(self) < 0 ? NULL : value_of(self->thread_values, names.control);
}

AmandaSwitches* switches_of(Interceptor* self, LastSwitches* last, PyObject* control) {
    if (!IS(control, control)) return NULL;
    if (last->control != control) {
        forget_switches(last);
        last->switches = amanda_open_switches(control, &last->view);
        if (last->switches == NULL) return NULL;
        last->control = Py_NewRef(control);
    }
    return last->switches;
}

void forget_switches(LastSwitches* last) {
    if (last->control == NULL) return;
    last->switches = NULL;
    PyBuffer_Release(&last->view);
    Py_CLEAR(last->control);
}
