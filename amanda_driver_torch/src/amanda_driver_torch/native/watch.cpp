// What a watch asks its session.
#include "watch.h"

#include "owned.h"

namespace amanda {

PyTypeObject* watch_type = nullptr;

bool Watch::read_session() {
    Owned backward(PyObject_GetAttrString(session, "wants_backward"));
    Owned scopes(PyObject_GetAttrString(session, "watches_scopes"));
    Owned calls(PyObject_GetAttrString(session, "watches_calls"));
    if (!backward || !scopes || !calls) return false;
    wants_backward = PyObject_IsTrue(backward.get()) == 1;
    watches_scopes = PyObject_IsTrue(scopes.get()) == 1;
    watches_calls = PyObject_IsTrue(calls.get()) == 1;
    PyObject* now = PyObject_GetAttrString(session, "epoch");
    if (now == nullptr) return false;
    Py_XSETREF(epoch, now);
    seen = switches->epoch;
    return true;
}

int watch_of(PyObject* attachment, Watch** watch) {
    *watch = nullptr;
    static PyObject* watch_name = PyUnicode_InternFromString("watch");
    Owned found(PyObject_GetAttr(attachment, watch_name));
    if (!found) return -1;
    if (Py_IS_TYPE(found.get(), watch_type)) *watch = reinterpret_cast<Watch*>(found.get());
    return 0;
}

bool is_skipped(Watch* watch, PyObject* where) {
    if (watch->failed == nullptr || !PyErr_ExceptionMatches(PyExc_Exception)) return false;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != nullptr) PyException_SetTraceback(value, trace);
    Owned own_type(type), error(value), own_trace(trace), function = Owned::share(watch->failed);
    Owned answer(PyObject_CallFunctionObjArgs(function.get(), error.get(), where, nullptr));
    return bool(answer);
}

}  // namespace amanda
