/* The state of a thread that native code of a driver reads at every operator.
 *
 * It is the buffer of `Control.switches`, of which `amanda_core.runtime.switches` describes the fields. A
 * driver ships a copy of this header. The pointer is valid until the view is released.
 */
#ifndef AMANDA_SWITCHES_H
#define AMANDA_SWITCHES_H

#include <Python.h>
#include <stdint.h>

#define AMANDA_SWITCHES_VERSION 1

typedef struct {
    int64_t version;
    int64_t enabled;
    int64_t caching;
    int64_t epoch;         /* of the session that runs in the thread; read-only for drivers */
    int64_t routine_depth; /* a driver that calls a routine adds 1, and takes it back */
} AmandaSwitches;

/* Return the switches of a `Control`, of which `view` keeps the memory; NULL with an exception. */
static inline AmandaSwitches* amanda_open_switches(PyObject* control, Py_buffer* view) {
    PyObject* switches = PyObject_GetAttrString(control, "switches");
    if (switches == NULL) return NULL;
    int failed = PyObject_GetBuffer(switches, view, PyBUF_WRITABLE);
    Py_DECREF(switches);
    if (failed) return NULL;
    AmandaSwitches* found = (AmandaSwitches*)view->buf;
    if (view->len < (Py_ssize_t)sizeof(AmandaSwitches) ||
        found->version != AMANDA_SWITCHES_VERSION) {
        PyBuffer_Release(view);
        PyErr_SetString(PyExc_ImportError,
                        "this driver was built for another version of amanda-core: install both again");
        return NULL;
    }
    return found;
}

#endif
