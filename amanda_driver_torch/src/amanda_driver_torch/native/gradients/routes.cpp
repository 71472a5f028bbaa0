// The traversal of nodes.
#include "gradients/routes.h"

#include "gradients/unwinding.h"
#include "torch_symbols.h"

namespace amanda {

namespace {

PyObject *grad_fn, *next_functions, *sequence_number;

}  // namespace

bool Route::read(PyObject* list) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        Place place;
        PyObject* kind;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "iiOL", &place.before, &place.edge, &kind,
                              &place.number)) {
            return false;
        }
        if (place.before >= int(i) || place.edge < 0) {
            PyErr_SetString(PyExc_ValueError, "a place comes after the place before it");
            return false;
        }
        place.kind = Owned::share(kind);
        places.push_back(std::move(place));
    }
    return true;
}

namespace {

// Returns an output; null if there is none.
PyObject* output_of(PyObject* returned, int number) {
    if (!PyTuple_Check(returned) && !PyList_Check(returned)) return returned;
    return PySequence_Fast_GET_SIZE(returned) > number ? PySequence_Fast_GET_ITEM(returned, number)
                                                       : nullptr;
}

// Returns the node that made an output; null, without an exception, if there is none.
Owned object_of_node(PyObject* returned, int number) {
    returned = output_of(returned, number);
    if (returned == nullptr) return Owned();
    Owned node(PyObject_GetAttr(returned, grad_fn));
    // A view whose base was written may have no node any more.
    if (!node) PyErr_Clear();
    return node;
}

}  // namespace

namespace {

// Returns the node at a place, given those before it; null if there is none.
Node* node_at(const Route::Place& place, Node* const* nodes, PyObject* returned) {
    if (place.before >= 0) return following(nodes[size_t(place.before)], size_t(place.edge));
    PyObject* output = output_of(returned, place.edge);
    return output != nullptr ? node_of(output) : nullptr;
}

}  // namespace

bool Route::follow(PyObject* returned, uint64_t start, std::vector<Owned>* nodes) const {
    std::vector<Owned> edges(places.size());  // of the nodes
    for (const Place& place : places) {
        Owned node;
        if (place.before < 0) {
            node = object_of_node(returned, place.edge);
            if (!node || !protect(node.get())) return false;
        } else {
            Owned& following = edges[size_t(place.before)];
            if (!following) {
                following =
                    Owned(PyObject_GetAttr((*nodes)[size_t(place.before)].get(), next_functions));
            }
            if (!following || !PyTuple_Check(following.get()) ||
                PyTuple_GET_SIZE(following.get()) <= place.edge) {
                return false;
            }
            PyObject* edge = PyTuple_GET_ITEM(following.get(), place.edge);
            if (!PyTuple_Check(edge) || PyTuple_GET_SIZE(edge) == 0) return false;
            node = Owned::share(PyTuple_GET_ITEM(edge, 0));
        }
        if (reinterpret_cast<PyObject*>(Py_TYPE(node.get())) != place.kind.get()) return false;
        if (place.number >= 0) {
            Owned found(PyObject_CallMethodNoArgs(node.get(), sequence_number));
            if (!found) return false;
            uint64_t own = PyLong_AsUnsignedLongLong(found.get());
            if (PyErr_Occurred() || own != start + uint64_t(place.number)) return false;
        }
        nodes->push_back(std::move(node));
    }
    if (can_read_graphs()) learn(returned);
    return true;
}

void Route::learn(PyObject* returned) const {
    Node* nodes[MOST];
    for (size_t i = 0; i < places.size() && i < MOST; ++i) {
        nodes[i] = node_at(places[i], nodes, returned);
        if (nodes[i] == nullptr) return;
        if (has_own_class(reinterpret_cast<PyTypeObject*>(places[i].kind.get()))) {
            places[i].node_class = class_of(nodes[i]);
        }
    }
}

bool Route::find(PyObject* returned, uint64_t start, Node* (&nodes)[MOST]) const {
    if (!can_read_graphs() || places.size() > MOST) return false;
    for (size_t i = 0; i < places.size(); ++i) {
        const Place& place = places[i];
        nodes[i] = place.node_class != nullptr ? node_at(place, nodes, returned) : nullptr;
        if (nodes[i] == nullptr || class_of(nodes[i]) != place.node_class ||
            (place.number >= 0 &&
             sequence_number_of(nodes[i]) != start + uint64_t(place.number))) {
            return false;
        }
    }
    return true;
}

int add_routes() {
    grad_fn = PyUnicode_InternFromString("grad_fn");
    next_functions = PyUnicode_InternFromString("next_functions");
    sequence_number = PyUnicode_InternFromString(kSequenceNumber);
    return sequence_number == nullptr ? -1 : 0;
}

}  // namespace amanda
