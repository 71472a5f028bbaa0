// The traversal of nodes.
#include "routes.h"

#include "torch_symbols.h"
#include "unwinding.h"

namespace amanda {

namespace {

PyObject *grad_fn, *next_functions, *sequence_number;

}  // namespace

bool Route::read(PyObject* parts) {
    PyObject *given_edges, *given_kinds;
    if (!PyArg_ParseTuple(parts, "O!O!L", &PyTuple_Type, &given_edges, &PyTuple_Type, &given_kinds,
                          &number)) {
        return false;
    }
    if (PyTuple_GET_SIZE(given_kinds) != PyTuple_GET_SIZE(given_edges) + 1) {
        PyErr_SetString(PyExc_ValueError, "a route has one node more than edges");
        return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given_edges); ++i) {
        edges.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(given_edges, i))));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given_kinds); ++i) {
        kinds.push_back(Owned::share(PyTuple_GET_ITEM(given_kinds, i)));
    }
    return PyErr_Occurred() == nullptr;
}

Owned Route::follow(PyObject* output, uint64_t start) const {
    Owned node(PyObject_GetAttr(output, grad_fn));
    if (!node || !protect(node.get())) return Owned();
    for (size_t i = 0;; ++i) {
        if (reinterpret_cast<PyObject*>(Py_TYPE(node.get())) != kinds[i].get()) {
            return Owned();
        }
        if (i == edges.size()) break;
        Owned following(PyObject_GetAttr(node.get(), next_functions));
        if (!following) return following;
        if (!PyTuple_Check(following.get()) || PyTuple_GET_SIZE(following.get()) <= edges[i]) {
            return Owned();
        }
        PyObject* edge = PyTuple_GET_ITEM(following.get(), edges[i]);
        if (!PyTuple_Check(edge) || PyTuple_GET_SIZE(edge) == 0) return Owned();
        node = Owned::share(PyTuple_GET_ITEM(edge, 0));
    }
    Owned found(PyObject_CallMethodNoArgs(node.get(), sequence_number));
    if (!found) return found;
    uint64_t own = PyLong_AsUnsignedLongLong(found.get());
    if (PyErr_Occurred() || own != start + uint64_t(number)) return Owned();
    return node;
}

int add_routes() {
    grad_fn = PyUnicode_InternFromString("grad_fn");
    next_functions = PyUnicode_InternFromString("next_functions");
    sequence_number = PyUnicode_InternFromString(kSequenceNumber);
    return sequence_number == nullptr ? -1 : 0;
}

}  // namespace amanda
