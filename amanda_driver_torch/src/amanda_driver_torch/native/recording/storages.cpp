#include "recording/storages.h"

#include "gradients/graphs.h"
#include "owned.h"
#include "torch_symbols.h"

namespace amanda {

namespace {

PyObject *untyped_storage = nullptr;

// What a call looks for and has found.
struct Search {
    PyObject *known, *storage_type;
    int64_t total = 0;
    Owned unknown, others;  // lists, or null
};

bool append(Owned* list, PyObject* item) {
    if (!*list) *list = Owned(PyList_New(0));
    return *list && item != nullptr && PyList_Append(list->get(), item) == 0;
}

// Returns true if `known` has a storage with this object.
bool is_known(const StorageMemory& storage, PyObject* holder, PyObject* known) {
    Owned id(PyLong_FromVoidPtr(holder));
    PyObject* seen = id ? PyDict_GetItemWithError(known, id.get()) : nullptr;  // borrowed
    if (seen == nullptr || !PyTuple_Check(seen) || PyTuple_GET_SIZE(seen) != 2 ||
        !PyLong_Check(PyTuple_GET_ITEM(seen, 0))) {
        return false;
    }
    return PyLong_AsVoidPtr(PyTuple_GET_ITEM(seen, 0)) == storage.data &&
           PyLong_AsLongLong(PyTuple_GET_ITEM(seen, 1)) == storage.size;
}

bool add(Search* search, PyObject* value, const StorageMemory& storage) {
    Owned holder(PyObject_CallMethodNoArgs(value, untyped_storage));
    if (!holder) return false;
    search->total += storage.size;
    if (is_known(storage, holder.get(), search->known)) return true;
    if (PyErr_Occurred()) return false;
    Owned fields(Py_BuildValue("((NLO))", PyLong_FromVoidPtr(const_cast<uint8_t*>(storage.data)),
                               static_cast<long long>(storage.size), holder.get()));
    // A named tuple is made like a tuple; its own function for this is one of Python.
    auto* type = reinterpret_cast<PyTypeObject*>(search->storage_type);
    Owned made(fields ? PyTuple_Type.tp_new(type, fields.get(), nullptr) : nullptr);
    return append(&search->unknown, made.get());
}

bool look(Search* search, PyObject* values) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(values); ++i) {
        Owned value = Owned::share(PySequence_Fast_GET_ITEM(values, i));
        if (PyTuple_CheckExact(value.get()) || PyList_CheckExact(value.get())) {
            if (!look(search, value.get())) return false;
            continue;
        }
        if (value.get() == Py_None || PyLong_Check(value.get()) || PyFloat_Check(value.get())) {
            continue;
        }
        void* const* tensor = can_read_storages() ? tensor_in(value.get()) : nullptr;
        StorageMemory storage = tensor == nullptr ? StorageMemory() : storage_of(*tensor);
        bool is_read = storage.data != nullptr && storage.size > 0;
        if (is_read ? !add(search, value.get(), storage) : !append(&search->others, value.get())) {
            return false;
        }
    }
    return true;
}

PyObject* storages(PyObject*, PyObject* args) {
    PyObject *otherwise, *values;
    Search search;
    if (!PyArg_ParseTuple(args, "OO!OO!", &otherwise, &PyType_Type, &search.storage_type, &values,
                          &PyDict_Type, &search.known)) {
        return nullptr;
    }
    Owned sequence(PySequence_Fast(values, "storages(otherwise, type, values, known)"));
    if (!sequence || !look(&search, sequence.get())) return nullptr;
    if (!search.unknown) search.unknown = Owned(PyList_New(0));
    Owned problem(PyUnicode_FromStringAndSize(nullptr, 0));
    if (search.others) {
        Owned answer(PyObject_CallFunctionObjArgs(otherwise, search.others.get(), search.known,
                                                  nullptr));
        long long total;
        PyObject *more, *why;
        if (!answer || !PyArg_ParseTuple(answer.get(), "LOO", &total, &more, &why) ||
            !search.unknown ||
            PyList_SetSlice(search.unknown.get(), PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, more) < 0) {
            return nullptr;
        }
        search.total += total;
        problem = Owned::share(why);
    }
    if (!search.unknown || !problem) return nullptr;
    return Py_BuildValue("LOO", static_cast<long long>(search.total), search.unknown.get(),
                         problem.get());
}

PyObject* knows_storages(PyObject*, PyObject*) {
    return PyBool_FromLong(can_read_storages() && can_read_graphs());
}

PyMethodDef methods[] = {
    {"storages", storages, METH_VARARGS,
     "storages(otherwise, storage_type, values, known, /)\n--\n\n"
     "Return what `Facts.storages` does: by the function `otherwise` for values that are not read "
     "here."},
    {"knows_storages", knows_storages, METH_NOARGS,
     "knows_storages()\n--\n\nReturn whether `storages` reads any."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_storages(PyObject* module) {
    Py_XSETREF(untyped_storage, PyUnicode_InternFromString("untyped_storage"));
    return untyped_storage == nullptr ? -1 : PyModule_AddFunctions(module, methods);
}

}  // namespace amanda
