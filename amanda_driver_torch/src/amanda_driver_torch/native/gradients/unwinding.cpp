// Nodes that keep the nodes after them alive.
#include "gradients/unwinding.h"

#include <cstdint>
#include <vector>

#include "owned.h"
#include "table.h"

namespace amanda {

namespace {

// One of so many nodes is chosen, by a hash. For any pattern of calls, hundreds of nodes in a row
// that are not chosen are then very unlikely.
constexpr uint64_t SOME = 64;

// The stack that freeing may use before it is continued elsewhere: some thousand nodes.
constexpr uintptr_t DEEP = uintptr_t(1) << 20;

PyTypeObject* following_type = nullptr;
PyObject *metadata_name, *next_functions, *key;

// The objects to free, and whether freeing is in progress; under the GIL.
std::vector<PyObject*> aside;
bool freeing = false;

// The key in a node's metadata.
struct Following {
    PyObject_HEAD
    PyObject* nodes;  // the node's `next_functions`
};

bool is_deep() {
    // Relative to the shallowest stack from which this thread has freed such a node.
    thread_local uintptr_t top = 0;
    char here;
    auto at = reinterpret_cast<uintptr_t>(&here);
    if (at > top) top = at;
    return top - at > DEEP;
}

COLD int free_aside(void*) {
    if (freeing) return 0;
    freeing = true;
    while (!aside.empty()) {
        PyObject* nodes = aside.back();
        aside.pop_back();
        Py_DECREF(nodes);
    }
    freeing = false;
    return 0;
}

void following_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject* nodes = reinterpret_cast<Following*>(self)->nodes;
    type->tp_free(self);
    Py_DECREF(type);
    if (!is_deep()) {
        Py_DECREF(nodes);
        return;
    }
    aside.push_back(nodes);
    // The interpreter calls it before one of the next instructions of the main thread. If its queue
    // is full, the next node is freed at this depth, or the next call of `protect` frees them.
    if (!freeing) Py_AddPendingCall(free_aside, nullptr);
}

COLD bool hold_following(PyObject* node) {
    if (!aside.empty()) free_aside(nullptr);
    Owned metadata(PyObject_GetAttr(node, metadata_name));
    Owned nodes(metadata ? PyObject_GetAttr(node, next_functions) : nullptr);
    if (!nodes) return false;
    Owned following(following_type->tp_alloc(following_type, 0));
    if (!following) return false;
    reinterpret_cast<Following*>(following.get())->nodes = nodes.release();
    return PyObject_SetItem(metadata.get(), key, following.get()) == 0;
}

PyObject* protect_method(PyObject*, PyObject* node) {
    return protect(node) ? Py_NewRef(node) : nullptr;
}

PyMethodDef methods[] = {
    {"protect", protect_method, METH_O,
     "protect(node, /)\n--\n\n"
     "Let the graph behind a node be freed without deep recursion; return the node."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot following_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(following_dealloc)},
    {Py_tp_doc, const_cast<char*>("The nodes behind a node, which are freed from a shallow stack.")},
    {0, nullptr},
};
PyType_Spec following_spec = {"amanda_driver_torch._native.Following", sizeof(Following), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                              following_slots};

}  // namespace

bool protect(PyObject* node) {
    static uint64_t count = 0;
    // Without another reference, the object is freed before its node, and torch frees in a loop.
    if (mix(0, ++count) % SOME != 0 || node == Py_None || Py_REFCNT(node) < 2) return true;
    return hold_following(node);
}

int add_unwinding(PyObject* module) {
    metadata_name = PyUnicode_InternFromString("metadata");
    next_functions = PyUnicode_InternFromString("next_functions");
    key = PyUnicode_InternFromString("amanda.following");
    following_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&following_spec));
    if (key == nullptr || following_type == nullptr) return -1;
    return PyModule_AddFunctions(module, methods);
}

}  // namespace amanda
