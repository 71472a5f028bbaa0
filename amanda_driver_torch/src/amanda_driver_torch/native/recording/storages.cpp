#include "recording/storages.h"

#include "gradients/graphs.h"
#include "owned.h"
#include "torch_symbols.h"

namespace amanda {

namespace {

PyObject *untyped_storage = nullptr;

// Returns the size of a tensor's storage if it is known; -1 if not, -2 with an exception.
int64_t known_size(PyObject* value, void* const& tensor, PyObject* known) {
    StorageMemory storage = storage_of(tensor);
    if (storage.data == nullptr) return -1;
    Owned holder(PyObject_CallMethodNoArgs(value, untyped_storage));
    Owned id(holder ? PyLong_FromVoidPtr(holder.get()) : nullptr);
    PyObject* seen = id ? PyDict_GetItemWithError(known, id.get()) : nullptr;  // borrowed
    if (PyErr_Occurred()) return -2;
    if (seen == nullptr || !PyTuple_Check(seen) || PyTuple_GET_SIZE(seen) != 2 ||
        !PyLong_Check(PyTuple_GET_ITEM(seen, 0))) {
        return -1;
    }
    void* data = PyLong_AsVoidPtr(PyTuple_GET_ITEM(seen, 0));
    int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(seen, 1));
    if (PyErr_Occurred()) return -2;
    return data == storage.data && size == storage.size ? size : -1;
}

// Adds up the sizes of known storages, and collects the other values.
bool look(PyObject* values, PyObject* known, int64_t* total, Owned* others) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(values); ++i) {
        Owned value = Owned::share(PySequence_Fast_GET_ITEM(values, i));
        if (PyTuple_CheckExact(value.get()) || PyList_CheckExact(value.get())) {
            if (!look(value.get(), known, total, others)) return false;
            continue;
        }
        if (value.get() == Py_None || PyLong_Check(value.get()) || PyFloat_Check(value.get())) {
            continue;
        }
        void* const* tensor = tensor_in(value.get());
        int64_t size = tensor == nullptr ? -1 : known_size(value.get(), *tensor, known);
        if (size == -2) return false;
        if (size >= 0) {
            *total += size;
            continue;
        }
        if (!*others) *others = Owned(PyList_New(0));
        if (!*others || PyList_Append(others->get(), value.get()) < 0) return false;
    }
    return true;
}

PyObject* known_storages(PyObject*, PyObject* args) {
    PyObject *values, *known;
    if (!PyArg_ParseTuple(args, "OO!", &values, &PyDict_Type, &known)) return nullptr;
    Owned sequence(PySequence_Fast(values, "known_storages(values, known)"));
    int64_t total = 0;
    Owned others;
    if (!sequence || !look(sequence.get(), known, &total, &others)) return nullptr;
    return Py_BuildValue("LO", static_cast<long long>(total),
                         others ? others.get() : Py_None);
}

PyObject* knows_storages(PyObject*, PyObject*) {
    return PyBool_FromLong(can_read_storages() && can_read_graphs());
}

PyMethodDef methods[] = {
    {"known_storages", known_storages, METH_VARARGS,
     "known_storages(values, known, /)\n--\n\n"
     "Return the sum of the sizes of the storages that are known, and a list of the other values, "
     "or None. `known` has the address and size of each by the id() of its object."},
    {"knows_storages", knows_storages, METH_NOARGS,
     "knows_storages()\n--\n\nReturn whether `known_storages` may be called."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_storages(PyObject* module) {
    Py_XSETREF(untyped_storage, PyUnicode_InternFromString("untyped_storage"));
    return untyped_storage == nullptr ? -1 : PyModule_AddFunctions(module, methods);
}

}  // namespace amanda
