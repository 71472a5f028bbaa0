// The single hook of an execution, which sets the others.
#include "gradients/pending.h"

#include "gradients/hooking.h"

namespace amanda {

namespace {

PyTypeObject* hook_type = nullptr;

struct PendingHook {
    PyObject_HEAD
    PyObject *start, *number, *hook;  // hook: its function, once it has set the others
    Shared<Pending> pending;
};

// Hooks the nodes of `node`, or of the running one for None: 1, or 0 if that must not be done now,
// or -1 with an exception.
int expand(PendingHook* own, PyObject* node) {
    if (own->hook != nullptr) return 1;
    Shared<Pending> pending = own->pending;
    Owned function = Owned::share(pending->function.get()),
          hook(PyObject_CallFunctionObjArgs(function.get(), own->start,
                                            own->number != nullptr ? own->number : Py_None, node,
                                            nullptr));
    if (!hook) return -1;
    if (hook.get() == Py_None) return 0;
    pending->spent = true;
    Py_XSETREF(own->hook, hook.release());
    return 1;
}

PyObject* hook_call(PyObject* self, PyObject* args, PyObject* kwargs) {
    auto* own = reinterpret_cast<PendingHook*>(self);
    Owned kept = Owned::share(self);
    int done = expand(own, Py_None);
    if (done < 0) return nullptr;
    if (done == 0) Py_RETURN_NONE;
    Owned hook = Owned::share(own->hook);
    return PyObject_Call(hook.get(), args, kwargs);
}

PyObject* hook_expand(PyObject* self, PyObject* node) {
    Owned kept = Owned::share(self);
    if (expand(reinterpret_cast<PendingHook*>(self), node) < 0) return nullptr;
    Py_RETURN_NONE;
}

void hook_dealloc(PyObject* self) {
    auto* own = reinterpret_cast<PendingHook*>(self);
    PyTypeObject* type = Py_TYPE(self);
    Py_CLEAR(own->start);
    Py_CLEAR(own->number);
    Py_CLEAR(own->hook);
    own->pending.~Shared();
    type->tp_free(self);
    Py_DECREF(type);
}

PyMethodDef hook_methods[] = {
    {"expand", hook_expand, METH_O,
     "expand($self, node, /)\n--\n\nHook what is behind a node that has this hook."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot hook_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(hook_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(hook_call)},
    {Py_tp_methods, hook_methods},
    {Py_tp_doc, const_cast<char*>("Hooks the nodes of an op when the first of them runs.")},
    {0, nullptr},
};
PyType_Spec hook_spec = {"amanda_driver_torch._native.PendingHook", sizeof(PendingHook), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, hook_slots};

}  // namespace

bool Pending::read(PyObject* parts) {
    PyObject *given_function, *given_route;
    if (!PyArg_ParseTuple(parts, "OO!", &given_function, &PyList_Type, &given_route)) return false;
    function = Owned::share(given_function);
    return route.read(given_route);
}

int hook_pending(const Shared<Pending>& pending, PyObject* output, uint64_t start) {
    std::vector<Owned> nodes;
    if (!pending->route.follow(output, start, &nodes)) return PyErr_Occurred() ? -1 : 0;
    Owned node = std::move(nodes.back());
    Owned hook(hook_type->tp_alloc(hook_type, 0));
    if (!hook) return -1;
    auto* own = reinterpret_cast<PendingHook*>(hook.get());
    new (&own->pending) Shared<Pending>(pending);
    own->start = PyLong_FromUnsignedLongLong(start);
    if (own->start == nullptr) return -1;
    own->number = hook_before(node.get(), hook.get()).release();
    return own->number != nullptr ? 1 : -1;
}

int add_pending(PyObject* module) {
    hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&hook_spec));
    if (hook_type == nullptr) return -1;
    return PyModule_AddObjectRef(module, "PendingHook", reinterpret_cast<PyObject*>(hook_type));
}

}  // namespace amanda
