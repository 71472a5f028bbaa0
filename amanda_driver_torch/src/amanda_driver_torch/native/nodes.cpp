// Hooks on the nodes of an op that are analysed already.
#include "nodes.h"

#include "pending.h"
#include "watch.h"

namespace amanda {

namespace {

PyTypeObject* plans_type = nullptr;

struct NodePlans {
    PyObject_HEAD
    PyObject* epoch;
    long long made;  // number of nodes that the op makes
    std::vector<Hooking>* hooks;
    Shared<Pending>* pending;  // used instead while no node is analysed; or null
};

NodePlans* plans_of(PyObject* object) {
    return object != nullptr && Py_TYPE(object) == plans_type
               ? reinterpret_cast<NodePlans*>(object)
               : nullptr;
}

// NodePlans(epoch, made, watch, before, after, pending=None): `before` and `after` are lists for
// `Hooking::read`, and `pending` is for `Pending::read`.
PyObject* plans_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *epoch, *watch, *before, *after, *pending = nullptr;
    long long made;
    if (!PyArg_ParseTuple(args, "OLOO!O!|O!", &epoch, &made, &watch, &PyList_Type, &before,
                          &PyList_Type, &after, &PyTuple_Type, &pending)) {
        return nullptr;
    }
    Owned self(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    auto* plans = reinterpret_cast<NodePlans*>(self.get());
    plans->epoch = Py_NewRef(epoch);
    plans->made = made;
    plans->hooks = new std::vector<Hooking>;
    if (pending != nullptr) {
        plans->pending = new Shared<Pending>(new Pending);
        if (!(*plans->pending)->read(pending)) return nullptr;
    }
    for (PyObject* list : {before, after}) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
            Hooking hooking;
            if (!hooking.read(list == before ? Seen::BEFORE : Seen::AFTER,
                              PyList_GET_ITEM(list, i), self.get(), epoch, watch)) {
                return nullptr;
            }
            plans->hooks->push_back(std::move(hooking));
        }
    }
    return self.release();
}

int plans_clear(PyObject* self) {
    auto* plans = reinterpret_cast<NodePlans*>(self);
    std::vector<Hooking>* hooks = std::exchange(plans->hooks, nullptr);
    if (hooks != nullptr) {
        for (Hooking& hooking : *hooks) {
            if (hooking.steps) hooking.steps->forget();
        }
        delete hooks;
    }
    delete std::exchange(plans->pending, nullptr);
    Py_CLEAR(plans->epoch);
    return 0;
}

int plans_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    auto* plans = reinterpret_cast<NodePlans*>(self);
    if (plans->hooks == nullptr) return 0;
    for (const Hooking& hooking : *plans->hooks) {
        if (!hooking.steps) continue;
        if (int stop = hooking.steps->traverse(visit, arg)) return stop;
    }
    return 0;
}

void plans_dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    plans_clear(self);
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject* plans_pending(PyObject* self, void*) {
    return PyBool_FromLong(reinterpret_cast<NodePlans*>(self)->pending != nullptr);
}

PyGetSetDef plans_fields[] = {
    {"pending", plans_pending, nullptr, "Whether nodes have not been analysed yet.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot plans_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(plans_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(plans_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(plans_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(plans_clear)},
    {Py_tp_getset, plans_fields},
    {Py_tp_doc, const_cast<char*>("The plans of the backward nodes of one op.")},
    {0, nullptr},
};
PyType_Spec plans_spec = {"amanda_driver_torch._native.NodePlans", sizeof(NodePlans), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plans_slots};

}  // namespace

bool may_serve(PyObject* object, const Watch* watch) {
    NodePlans* plans = plans_of(object);
    return plans != nullptr && plans->hooks != nullptr && plans->epoch == watch->epoch &&
           !watch->second_order && (plans->pending == nullptr || !(*plans->pending)->spent);
}

bool serves(PyObject* object, const Watch* watch, uint64_t made) {
    return may_serve(object, watch) && uint64_t(plans_of(object)->made) == made;
}

int hook_nodes(PyObject* object, PyObject* output, uint64_t start) {
    Owned kept = Owned::share(object);
    NodePlans* plans = plans_of(object);
    if (plans->pending != nullptr) {
        Shared<Pending> pending = *plans->pending;
        return hook_pending(pending, output, start);
    }
    std::vector<Owned> nodes;
    for (const Hooking& hooking : *plans->hooks) {
        nodes.push_back(hooking.route.follow(output, start));
        if (!nodes.back()) return PyErr_Occurred() ? -1 : 0;
    }
    for (size_t i = 0; plans->hooks != nullptr && i < nodes.size(); ++i) {
        const Hooking& hooking = (*plans->hooks)[i];
        if (!hook_node(nodes[i].get(), hooking.hook.get(), hooking.steps->seen)) return -1;
    }
    return 1;
}

int add_nodes(PyObject* module) {
    plans_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&plans_spec));
    if (plans_type == nullptr || add_pending(module) < 0) return -1;
    return PyModule_AddObjectRef(module, "NodePlans", reinterpret_cast<PyObject*>(plans_type));
}

}  // namespace amanda
