// The state of threads, its lifetime, and the descriptors by which Python accesses it.
#include "thread.h"

#include <cstring>

#include "owned.h"
#include "steps.h"
#include "watch.h"

namespace amanda {

#if defined(__GLIBC__)
thread_local Thread* current __attribute__((tls_model("initial-exec"))) = nullptr;
#else
thread_local Thread* current = nullptr;
#endif

PyObject* ask = nullptr;
unsigned asking = 1;

namespace {

PyTypeObject* thread_type = nullptr;

void thread_dealloc(PyObject* self) {
    auto* thread = reinterpret_cast<Thread*>(self);
    // The same OS thread may get a new interpreter state later (threads made by C++).
    if (current == thread) current = nullptr;
    PyTypeObject* type = Py_TYPE(self);
    Py_CLEAR(thread->attachment);
    Py_CLEAR(thread->activations);
    PyBuffer_Release(&thread->switches);
    type->tp_free(self);
    Py_DECREF(type);
}

// Returns the calling thread's state, made at the first call; null on error.
Thread* here() {
    if (current != nullptr && current->state == PyThreadState_Get()) return current;
    PyObject* owner = PyThreadState_GetDict();
    if (owner == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "no thread state");
        return nullptr;
    }
    auto* thread = reinterpret_cast<Thread*>(thread_type->tp_alloc(thread_type, 0));
    if (thread == nullptr) return nullptr;
    thread->state = PyThreadState_Get();
    thread->activations = PyList_New(0);
    // The dict owns it, so it is freed with the interpreter's thread state, under the GIL.
    if (thread->activations == nullptr ||
        PyDict_SetItemString(owner, "amanda_driver_torch._native",
                             reinterpret_cast<PyObject*>(thread)) < 0) {
        Py_DECREF(thread);
        return nullptr;
    }
    Py_DECREF(thread);
    current = thread;
    return thread;
}

enum Kind { ATTACHMENT, ACTIVATIONS, QUIET, OPAQUE, DEPTH, REFUSED, RECOMPUTING, BACKWARD };
constexpr const char* NAMES[] = {"attachment", "activations", "quiet",
                                 "opaque",     "depth",       "refused", "recomputing", "backward"};

struct Field {
    PyObject_HEAD
    int kind;
};

PyObject* field_get(PyObject* self, PyObject* instance, PyObject*) {
    if (instance == nullptr) return Py_NewRef(self);
    Thread* thread = here();
    if (thread == nullptr) return nullptr;
    switch (reinterpret_cast<Field*>(self)->kind) {
        case ATTACHMENT:
            return Py_NewRef(thread->attachment != nullptr ? thread->attachment : Py_None);
        case ACTIVATIONS:
            return Py_NewRef(thread->activations);
        case QUIET:
            return PyLong_FromLong(thread->quiet);
        case OPAQUE:
            return PyLong_FromLong(thread->opaque);
        case DEPTH:
            return PyLong_FromLong(thread->depth);
        case BACKWARD:
            return PyLong_FromLong(thread->backward);
        case REFUSED:
            return PyBool_FromLong(thread->refused);
        default:
            return PyBool_FromLong(thread->recomputing);
    }
}

int set_attachment(Thread* thread, PyObject* value) {
    Watch* watch = nullptr;
    AmandaSwitches* switches = nullptr;
    Py_buffer view = {};
    if (value != Py_None) {
        if (watch_of(value, &watch) < 0) return -1;
        if (watch != nullptr) {
            Owned control(PyObject_CallNoArgs(watch->get_control));
            if (!control || !(switches = amanda_open_switches(control.get(), &view))) return -1;
        }
    }
    PyObject* before = thread->attachment;
    Py_buffer view_before = thread->switches;
    thread->attachment = value == Py_None ? nullptr : Py_NewRef(value);
    thread->watch = watch;  // The attachment keeps it alive.
    thread->switches = view;
    thread->routine_depth = switches != nullptr ? &switches->routine_depth : nullptr;
    Py_XDECREF(before);
    PyBuffer_Release(&view_before);
    return 0;
}

int field_set(PyObject* self, PyObject*, PyObject* value) {
    int kind = reinterpret_cast<Field*>(self)->kind;
    if (value == nullptr) {
        PyErr_Format(PyExc_AttributeError, "%s cannot be deleted", NAMES[kind]);
        return -1;
    }
    Thread* thread = here();
    if (thread == nullptr) return -1;
    if (kind == ATTACHMENT) return set_attachment(thread, value);
    if (kind == ACTIVATIONS) {
        if (!PyList_CheckExact(value)) {
            PyErr_SetString(PyExc_TypeError, "activations is a list");
            return -1;
        }
        PyObject* before = thread->activations;
        thread->activations = Py_NewRef(value);
        Py_DECREF(before);
        return 0;
    }
    long number = PyLong_AsLong(value);
    if (number == -1 && PyErr_Occurred()) return -1;
    if (kind == QUIET) thread->quiet = int(number);
    if (kind == OPAQUE) thread->opaque = int(number);
    if (kind == DEPTH) thread->depth = int(number);
    if (kind == REFUSED) thread->refused = number != 0;
    if (kind == BACKWARD) thread->backward = int(number);
    if (kind == RECOMPUTING) thread->recomputing = number != 0;
    return 0;
}

PyType_Slot field_slots[] = {
    {Py_tp_descr_get, reinterpret_cast<void*>(field_get)},
    {Py_tp_descr_set, reinterpret_cast<void*>(field_set)},
    {Py_tp_doc, const_cast<char*>("One field of the calling thread's state.")},
    {0, nullptr},
};
PyType_Spec field_spec = {"amanda_driver_torch._native.Field", sizeof(Field), 0,
                          Py_TPFLAGS_DEFAULT, field_slots};

PyType_Slot thread_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(thread_dealloc)},
    {Py_tp_doc, const_cast<char*>("The state of one thread.")},
    {0, nullptr},
};
PyType_Spec thread_spec = {"amanda_driver_torch._native.Thread", sizeof(Thread), 0,
                           Py_TPFLAGS_DEFAULT, thread_slots};

PyObject* set_ask(PyObject*, PyObject* function) {
    ++asking;
    Py_XSETREF(ask, function == Py_None ? nullptr : Py_NewRef(function));
    Py_RETURN_NONE;
}

PyObject* share(PyObject*, PyObject* value) {
    set_sharing(value == Py_True);
    Py_RETURN_NONE;
}

PyObject* this_thread(PyObject*, PyObject*) {
    return Py_XNewRef(reinterpret_cast<PyObject*>(here()));
}

// Ends the instrumentation of a thread by an attachment, from another thread. While the thread is
// inside an operator or a backward pass, its further operators are ignored and this returns False.
PyObject* leave_thread(PyObject*, PyObject* args) {
    PyObject *thread, *attachment;
    if (!PyArg_ParseTuple(args, "O!O", thread_type, &thread, &attachment)) return nullptr;
    auto* left = reinterpret_cast<Thread*>(thread);
    if (left->attachment != attachment) Py_RETURN_TRUE;
    if (left->quiet < HUSHED) left->quiet += HUSHED;
    if (left->depth || left->opaque || left->backward) Py_RETURN_FALSE;
    Owned activations(PyList_New(0));
    if (!activations || set_attachment(left, Py_None) < 0) return nullptr;
    PyObject* before = left->activations;
    left->activations = activations.release();
    Py_DECREF(before);
    left->quiet -= HUSHED;
    Py_RETURN_TRUE;
}

PyMethodDef functions[] = {
    {"set_ask", set_ask, METH_O,
     "set_ask(function, /)\n--\n\nCall `function` with the name of an operator, once in each thread "
     "that runs one without a session; None to end this. It returns None to be asked again."},
    {"share", share, METH_O,
     "share(value, /)\n--\n\nSay whether several threads may run routines of one tool."},
    {"this_thread", this_thread, METH_NOARGS,
     "this_thread()\n--\n\nReturn the calling thread's state, for `leave_thread`."},
    {"leave_thread", leave_thread, METH_VARARGS,
     "leave_thread(thread, attachment, /)\n--\n\nStop instrumenting a thread by an attachment; "
     "return False if it is inside an operator, until which its operators are ignored."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

COLD bool has_joined(PyObject* op) {
    Thread* thread = here();
    if (thread == nullptr) {
        PyErr_Clear();
        return false;
    }
    if (thread->asked == asking || thread->quiet || thread->depth || thread->opaque) return false;
    thread->asked = asking;
    Owned function = Owned::share(ask), answer(PyObject_CallOneArg(function.get(), op));
    if (!answer) {
        Owned kind = Owned::share(PyErr_Occurred());
        PyErr_Clear();
        // An error of the driver is not the program's. Ctrl-C is: it arrives after the operator.
        if (!PyErr_GivenExceptionMatches(kind.get(), PyExc_Exception)) {
            thread->asked = 0;
            PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), kind.get());
        }
    } else if (answer.get() == Py_None) {
        thread->asked = 0;
    }
    return thread->attachment != nullptr;
}

int add_thread(PyObject* module) {
    thread_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&thread_spec));
    if (thread_type == nullptr) return -1;
    auto* field_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&field_spec));
    if (field_type == nullptr) return -1;
    PyObject* fields = PyDict_New();
    if (fields == nullptr) return -1;
    for (int kind = ATTACHMENT; kind <= BACKWARD; ++kind) {
        auto* field = reinterpret_cast<Field*>(field_type->tp_alloc(field_type, 0));
        if (field == nullptr) return -1;
        field->kind = kind;
        int failed = PyDict_SetItemString(fields, NAMES[kind], reinterpret_cast<PyObject*>(field));
        Py_DECREF(field);
        if (failed < 0) return -1;
    }
    Py_DECREF(field_type);
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    return PyModule_AddObject(module, "THREAD_FIELDS", fields);
}

}  // namespace amanda
