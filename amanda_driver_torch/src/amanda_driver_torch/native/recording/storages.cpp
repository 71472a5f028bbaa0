#include "recording/storages.h"

#include <structmember.h>

#include <cstddef>

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

bool look_at(Search* search, PyObject* value) {
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
            Owned item = Owned::share(PySequence_Fast_GET_ITEM(value, i));
            if (!look_at(search, item.get())) return false;
        }
        return true;
    }
    if (value == Py_None || PyLong_Check(value) || PyFloat_Check(value)) return true;
    void* const* tensor = can_read_storages() ? tensor_in(value) : nullptr;
    StorageMemory storage = tensor == nullptr ? StorageMemory() : storage_of(*tensor);
    bool is_read = storage.data != nullptr && storage.size > 0;
    return is_read ? add(search, value, storage) : append(&search->others, value);
}

PyObject* storages(PyObject*, PyObject* args) {
    PyObject *otherwise, *values;
    Search search;
    if (!PyArg_ParseTuple(args, "OO!OO!", &otherwise, &PyType_Type, &search.storage_type, &values,
                          &PyDict_Type, &search.known)) {
        return nullptr;
    }
    Owned sequence(PySequence_List(values));
    if (!sequence || !look_at(&search, sequence.get())) return nullptr;
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

// A routine that is only called if it gets memory that is not known, or another amount than before.
struct UnlessKnown {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *routine, *storage_type, *known, *sizes;
    char without_context;
};

PyObject* unless_known_call(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
    auto* own = reinterpret_cast<UnlessKnown*>(self);
    Search search{own->known, own->storage_type};
    bool is_known = true;
    for (Py_ssize_t i = 0; is_known && i < PyVectorcall_NARGS(flags); ++i) {
        is_known = look_at(&search, values[i]) && !search.unknown && !search.others;
    }
    Owned total(is_known ? PyLong_FromLongLong(search.total) : nullptr);
    if (total && PySet_Contains(own->sizes, total.get()) == 1) Py_RETURN_NONE;
    PyErr_Clear();
    Owned routine = Owned::share(own->routine);
    return PyObject_Vectorcall(routine.get(), values, flags, names);
}

int unless_known_traverse(PyObject* self, visitproc visit, void* arg) {
    auto* own = reinterpret_cast<UnlessKnown*>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(own->routine);
    Py_VISIT(own->known);
    Py_VISIT(own->sizes);
    return 0;
}

void unless_known_dealloc(PyObject* self) {
    auto* own = reinterpret_cast<UnlessKnown*>(self);
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    for (PyObject* held : {own->routine, own->storage_type, own->known, own->sizes}) Py_XDECREF(held);
    type->tp_free(self);
    Py_DECREF(type);
}

PyTypeObject* unless_known_type = nullptr;
PyMemberDef unless_known_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(UnlessKnown, call), READONLY, nullptr},
    {"__amanda_without_context__", T_BOOL, offsetof(UnlessKnown, without_context), READONLY, nullptr},
    {"__wrapped__", T_OBJECT_EX, offsetof(UnlessKnown, routine), READONLY, "The routine."},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot unless_known_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(unless_known_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(unless_known_traverse)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, unless_known_members},
    {0, nullptr},
};
PyType_Spec unless_known_spec = {"amanda_driver_torch._native.UnlessKnown", sizeof(UnlessKnown), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                     Py_TPFLAGS_HAVE_VECTORCALL |
                                     Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 unless_known_slots};

PyObject* unless_known(PyObject*, PyObject* args) {
    PyObject *routine, *storage_type, *known, *sizes;
    if (!PyArg_ParseTuple(args, "O!OO!O!", &PyType_Type, &storage_type, &routine, &PyDict_Type,
                          &known, &PySet_Type, &sizes)) {
        return nullptr;
    }
    PyObject* made = unless_known_type->tp_alloc(unless_known_type, 0);
    if (made == nullptr) return nullptr;
    auto* own = reinterpret_cast<UnlessKnown*>(made);
    own->call = unless_known_call;
    own->routine = Py_NewRef(routine);
    own->storage_type = Py_NewRef(storage_type);
    own->known = Py_NewRef(known);
    own->sizes = Py_NewRef(sizes);
    own->without_context = 1;
    return made;
}

PyObject* knows_storages(PyObject*, PyObject*) {
    return PyBool_FromLong(can_read_storages() && can_read_graphs());
}

PyMethodDef methods[] = {
    {"storages", storages, METH_VARARGS,
     "storages(otherwise, storage_type, values, known, /)\n--\n\n"
     "Return what `Facts.storages` does: by the function `otherwise` for values that are not read "
     "here."},
    {"unless_known", unless_known, METH_VARARGS,
     "unless_known(storage_type, routine, known, sizes, /)\n--\n\n"
     "Return a routine that does what `Facts.unless_known` says."},
    {"knows_storages", knows_storages, METH_NOARGS,
     "knows_storages()\n--\n\nReturn whether `storages` reads any."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_storages(PyObject* module) {
    Py_XSETREF(untyped_storage, PyUnicode_InternFromString("untyped_storage"));
    unless_known_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&unless_known_spec));
    if (untyped_storage == nullptr || unless_known_type == nullptr) return -1;
    return PyModule_AddFunctions(module, methods);
}

}  // namespace amanda
