// Hooks on the nodes of an op that are analysed already.
#include "gradients/nodes.h"

#include <algorithm>

#include "gradients/hooking.h"
#include "gradients/pending.h"
#include "record.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

PyTypeObject* plans_type = nullptr;
PyObject* variable = nullptr;

// The accumulation into a leaf.
struct Leaf {
    int place;       // in the route
    Owned leaf;      // weak; None for any
    Owned function;  // (node) -> None: hooks the node
    Owned plans;     // by which C hooks it, or None
};

struct NodePlans {
    PyObject_HEAD
    PyObject* epoch;
    long long made;  // number of nodes that the op makes
    std::vector<Hooking>* hooks;
    Route* route;  // to all nodes
    std::vector<Leaf>* leaves;
    Shared<Pending>* pending;  // used instead while no node is analysed; or null
    bool outdated;             // whether nodes have been analysed since
    bool needs_context;        // whether routines may read it
};

NodePlans* plans_of(PyObject* object) {
    return object != nullptr && Py_TYPE(object) == plans_type
               ? reinterpret_cast<NodePlans*>(object)
               : nullptr;
}

// NodePlans(epoch, made, watch, before, after, pending=None, route=[], leaves=[], life=None):
// `before` and `after` are lists for `Hooking::read`, `pending` is for `Pending::read`, `route` for
// `Route::read`, `life` is that of a leaf's hooks, and each leaf is (place, reference, function,
// plans or None).
PyObject* plans_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *epoch, *watch, *before, *after, *pending = Py_None, *route = nullptr,
                                              *leaves = nullptr, *life = Py_None;
    long long made;
    if (!PyArg_ParseTuple(args, "OLOO!O!|OO!O!O", &epoch, &made, &watch, &PyList_Type, &before,
                          &PyList_Type, &after, &pending, &PyList_Type, &route, &PyList_Type,
                          &leaves, &life)) {
        return nullptr;
    }
    Owned self(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    auto* plans = reinterpret_cast<NodePlans*>(self.get());
    plans->epoch = Py_NewRef(epoch);
    plans->made = made;
    plans->hooks = new std::vector<Hooking>;
    plans->route = new Route;
    plans->leaves = new std::vector<Leaf>;
    if (route != nullptr && !plans->route->read(route)) return nullptr;
    for (Py_ssize_t i = 0; leaves != nullptr && i < PyList_GET_SIZE(leaves); ++i) {
        Leaf one;
        PyObject *leaf, *function, *leaf_plans;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(leaves, i), "iOOO", &one.place, &leaf, &function,
                              &leaf_plans)) {
            return nullptr;
        }
        one.leaf = Owned::share(leaf);
        one.function = Owned::share(function);
        one.plans = Owned::share(leaf_plans);
        plans->leaves->push_back(std::move(one));
    }
    if (pending != Py_None) {
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
            if (PyList_Check(life)) hooking.steps->life = Owned::share(life);
            plans->hooks->push_back(std::move(hooking));
        }
    }
    plans->needs_context = pending != Py_None;
    for (const Hooking& hooking : *plans->hooks) {
        plans->needs_context |= hooking.steps->analyses || hooking.steps->needs_context;
    }
    for (const Leaf& leaf : *plans->leaves) {
        NodePlans* of_leaf = plans_of(leaf.plans.get());
        plans->needs_context |= of_leaf == nullptr || of_leaf->needs_context;
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
    delete std::exchange(plans->leaves, nullptr);
    delete std::exchange(plans->route, nullptr);
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
    for (const Leaf& leaf : *plans->leaves) {
        Py_VISIT(leaf.function.get());
        Py_VISIT(leaf.plans.get());
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

// Returns the hooks of one node, which hold `own`, and whether each comes before the node.
PyObject* plans_make(PyObject* self, PyObject* own) {
    auto* plans = reinterpret_cast<NodePlans*>(self);
    Owned made(PyList_New(0));
    for (size_t i = 0; made && plans->hooks != nullptr && i < plans->hooks->size(); ++i) {
        const Hooking& hooking = (*plans->hooks)[i];
        Owned hook = hooking.make(own);
        if (!hook) return nullptr;
        Owned pair(PyTuple_Pack(2, hooking.steps->seen == Seen::BEFORE ? Py_True : Py_False,
                                hook.get()));
        if (!pair || PyList_Append(made.get(), pair.get()) < 0) return nullptr;
    }
    return made.release();
}

// Hooks the nodes of `returned`: 1, or 0 if they differ from last time, or -1 with an exception.
int hook_nodes(PyObject* object, PyObject* returned, uint64_t start);

bool is_current(const NodePlans* plans) {
    return plans->hooks != nullptr && !plans->outdated &&
           (plans->pending == nullptr || !(*plans->pending)->spent);
}

// (epoch, outputs, start): hooks the nodes of an execution that Python has run.
PyObject* plans_hook(PyObject* self, PyObject* args) {
    auto* plans = reinterpret_cast<NodePlans*>(self);
    PyObject *epoch, *outputs;
    unsigned long long start;
    if (!PyArg_ParseTuple(args, "OO!K", &epoch, &PyList_Type, &outputs, &start)) return nullptr;
    int hooked = is_current(plans) ? PyObject_RichCompareBool(epoch, plans->epoch, Py_EQ) : 0;
    if (hooked == 1) {
        hooked = next_sequence_number() - start == uint64_t(plans->made)
                     ? hook_nodes(self, outputs, start)
                     : 0;
    }
    return hooked < 0 ? nullptr : PyBool_FromLong(hooked);
}

PyMethodDef plans_methods[] = {
    {"hook", plans_hook, METH_VARARGS,
     "hook($self, epoch, outputs, start, /)\n--\n\nHook the nodes of an execution; return False "
     "if it is unlike the earlier one."},
    {"make", plans_make, METH_O,
     "make($self, own, /)\n--\n\nReturn the hooks of one node, which hold `own`, and whether each "
     "comes before the node."},
    {nullptr, nullptr, 0, nullptr},
};
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
    {Py_tp_methods, plans_methods},
    {Py_tp_doc, const_cast<char*>("The plans of the backward nodes of one op.")},
    {0, nullptr},
};
PyType_Spec plans_spec = {"amanda_driver_torch._native.NodePlans", sizeof(NodePlans), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plans_slots};

}  // namespace

namespace {

// Hooks the nodes at all places without Python objects, if that may be done.
bool hook_quickly(const NodePlans* plans, Node* const* nodes) {
    auto can_hook = [&](const Hooking& hooking) {
        return can_hook_in_graph(nodes[size_t(hooking.place)], hooking.steps->seen);
    };
    auto can_hook_at = [&](const Leaf& leaf) {
        const Node* node = nodes[size_t(leaf.place)];
        PyObject* tensor = leaf.plans.get() != Py_None ? PyWeakref_GET_OBJECT(leaf.leaf.get())
                                                       : nullptr;
        return tensor != nullptr && plans_of(leaf.plans.get())->hooks != nullptr &&
               accumulates(node, tensor) && can_hook_leaf(node);
    };
    const auto &hooks = *plans->hooks;
    const auto &leaves = *plans->leaves;
    if (!std::all_of(hooks.begin(), hooks.end(), can_hook) ||
        !std::all_of(leaves.begin(), leaves.end(), can_hook_at)) {
        return false;
    }
    for (const Hooking& hooking : hooks) {
        hook_in_graph(nodes[size_t(hooking.place)], hooking.hook, hooking.steps->seen);
    }
    for (const Leaf& leaf : leaves) {
        hook_leaf(nodes[size_t(leaf.place)], *plans_of(leaf.plans.get())->hooks);
    }
    return true;
}

// Returns true if it is one of this epoch.
bool may_serve(PyObject* object, const Watch* watch) {
    NodePlans* plans = plans_of(object);
    return plans != nullptr && is_current(plans) && plans->epoch == watch->epoch &&
           !watch->second_order;
}

int hook_nodes(PyObject* object, PyObject* returned, uint64_t start) {
    Owned kept = Owned::share(object);
    NodePlans* plans = plans_of(object);
    if (plans->pending != nullptr) {
        Shared<Pending> pending = *plans->pending;
        return hook_pending(pending, returned, start);
    }
    Node* found[Route::MOST];
    if (plans->route->find(returned, start, found) && hook_quickly(plans, found)) return 1;
    std::vector<Owned> nodes;
    if (!plans->route->follow(returned, start, &nodes)) return PyErr_Occurred() ? -1 : 0;
    for (const Leaf& leaf : *plans->leaves) {
        Owned own(PyObject_GetAttr(nodes[size_t(leaf.place)].get(), variable));
        if (!own) return -1;
        // Another leaf at this place of the program has another plan.
        if (leaf.leaf.get() != Py_None && !leads_to(leaf.leaf, own.get())) return 0;
    }
    for (size_t i = 0; plans->hooks != nullptr && i < plans->hooks->size(); ++i) {
        const Hooking& hooking = (*plans->hooks)[i];
        PyObject* node = nodes[size_t(hooking.place)].get();
        if (!hook_node(node, hooking.hook.get(), hooking.steps->seen)) return -1;
    }
    for (size_t i = 0; plans->leaves != nullptr && i < plans->leaves->size(); ++i) {
        Owned function = (*plans->leaves)[i].function;
        PyObject* node = nodes[size_t((*plans->leaves)[i].place)].get();
        if (!Owned(PyObject_CallOneArg(function.get(), node))) return -1;
    }
    return 1;
}

}  // namespace

int hook_record(const Watch* watch, PyObject* record, PyObject* returned, uint64_t start) {
    PyObject* hooks = slot(record, hooks_at);
    uint64_t made = next_sequence_number() - start;
    if (!may_serve(hooks, watch) || uint64_t(plans_of(hooks)->made) != made) return 0;
    auto is_plain = [&](PyObject* value) {
        return reinterpret_cast<PyObject*>(Py_TYPE(value)) == watch->identity->tensor;
    };
    if (PyTuple_Check(returned) || PyList_Check(returned)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(returned); ++i) {
            if (!is_plain(PySequence_Fast_GET_ITEM(returned, i))) return 0;
        }
    } else if (!is_plain(returned)) {
        return 0;
    }
    return hook_nodes(hooks, returned, start);
}

bool may_hook(const Watch* watch, PyObject* record) {
    return may_serve(slot(record, hooks_at), watch);
}

bool may_hook_notes(const Watch* watch, PyObject* record) {
    PyObject* object = slot(record, hooks_at);
    return may_serve(object, watch) && !plans_of(object)->needs_context;
}

bool hooks_later(const Watch* watch, PyObject* record) {
    return !may_hook(watch, record) || plans_of(slot(record, hooks_at))->pending != nullptr;
}

void outdate(PyObject* object) {
    plans_of(object)->outdated = true;
}

int add_nodes(PyObject* module) {
    variable = PyUnicode_InternFromString("variable");
    plans_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&plans_spec));
    if (plans_type == nullptr || add_pending(module) < 0) return -1;
    return PyModule_AddObjectRef(module, "NodePlans", reinterpret_cast<PyObject*>(plans_type));
}

}  // namespace amanda
