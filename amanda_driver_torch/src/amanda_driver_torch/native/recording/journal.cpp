// Journals as Python objects. `amanda_core.driver_kit.marks` has the form of what they record.
#include "recording/journal.h"

#include <structmember.h>

#include <chrono>
#include <cstdint>
#include <new>
#include <vector>

#include "owned.h"
#include "steps.h"

namespace amanda {

namespace {

PyTypeObject *mark_type = nullptr, *journal_type = nullptr;
PyObject *note_function = nullptr, *make_mark = nullptr;

// A mark is its number, the time and the thread.
constexpr size_t PER_MARK = 3;

struct Journal {
    PyObject_HEAD
    PyObject* full;  // is called when there are `most` marks
    size_t most;
    std::vector<int64_t>* marks;
};

struct Mark {
    PyObject_HEAD
    vectorcallfunc call;
    Journal* journal;
    int64_t number;
};

PyObject* mark_call(PyObject* self, PyObject* const*, size_t, PyObject*) {
    using namespace std::chrono;
    auto* mark = reinterpret_cast<Mark*>(self);
    std::vector<int64_t>& marks = *mark->journal->marks;
    auto now = steady_clock::now().time_since_epoch();
    marks.insert(marks.end(), {mark->number, int64_t(duration_cast<nanoseconds>(now).count()),
                               int64_t(PyThread_get_thread_ident())});
    if (marks.size() < PER_MARK * mark->journal->most) Py_RETURN_NONE;
    Owned journal = Owned::share(reinterpret_cast<PyObject*>(mark->journal));
    return Owned(PyObject_CallNoArgs(mark->journal->full)) ? Py_NewRef(Py_None) : nullptr;
}

void mark_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_DECREF(reinterpret_cast<PyObject*>(reinterpret_cast<Mark*>(self)->journal));
    type->tp_free(self);
    Py_DECREF(type);
}

// Journal(full, most): `full` must not lead to it.
PyObject* journal_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* full;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "On", &full, &most)) return nullptr;
    Owned made(type->tp_alloc(type, 0));
    if (!made) return nullptr;
    auto* self = reinterpret_cast<Journal*>(made.get());
    self->marks = new std::vector<int64_t>();
    self->full = Py_NewRef(full);
    self->most = size_t(most);
    return made.release();
}

void journal_dealloc(PyObject* given) {
    auto* self = reinterpret_cast<Journal*>(given);
    PyTypeObject* type = Py_TYPE(given);
    delete self->marks;
    Py_XDECREF(self->full);
    type->tp_free(given);
    Py_DECREF(type);
}

// () -> the marks since the last call, as bytes.
PyObject* journal_call(PyObject* given, PyObject*, PyObject*) {
    std::vector<int64_t>& marks = *reinterpret_cast<Journal*>(given)->marks;
    PyObject* found = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(marks.data()),
                                                Py_ssize_t(marks.size() * sizeof(int64_t)));
    if (found != nullptr) marks.clear();
    return found;
}

PyObject* journal_mark(PyObject* given, PyObject* number) {
    int64_t value = PyLong_AsLongLong(number);
    if (PyErr_Occurred()) return nullptr;
    PyObject* made = mark_type->tp_alloc(mark_type, 0);
    if (made == nullptr) return nullptr;
    auto* mark = reinterpret_cast<Mark*>(made);
    mark->call = mark_call;
    mark->journal = reinterpret_cast<Journal*>(Py_NewRef(given));
    mark->number = value;
    return made;
}

// (note, make): `make` returns what records the same as a step whose routine is the method `note`, or
// None.
PyObject* learn_marks(PyObject*, PyObject* args) {
    PyObject *note, *make;
    if (!PyArg_ParseTuple(args, "OO", &note, &make)) return nullptr;
    Py_XSETREF(note_function, Py_NewRef(note));
    Py_XSETREF(make_mark, Py_NewRef(make));
    Py_RETURN_NONE;
}

PyMemberDef mark_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Mark, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot mark_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(mark_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, mark_members},
    {0, nullptr},
};
PyType_Spec mark_spec = {
    "amanda_driver_torch._native.Mark", sizeof(Mark), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, mark_slots};

PyMethodDef journal_methods[] = {
    {"mark", journal_mark, METH_O,
     "mark($self, number, /)\n--\n\nReturn a routine that records this number, the time and the "
     "thread."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot journal_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(journal_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(journal_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(journal_call)},
    {Py_tp_methods, journal_methods},
    {0, nullptr},
};
PyType_Spec journal_spec = {"amanda_driver_torch._native.Journal", sizeof(Journal), 0,
                            Py_TPFLAGS_DEFAULT, journal_slots};

PyMethodDef functions[] = {
    {"learn_marks", learn_marks, METH_VARARGS,
     "learn_marks(note, make, /)\n--\n\n"
     "Record marks without Python: of a step whose routine is the method `note`, by what `make` "
     "returns of it."},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* find_mark(PyObject* routine, PyObject* step) {
    if (make_mark == nullptr || !PyMethod_Check(routine) ||
        PyMethod_GET_FUNCTION(routine) != note_function) {
        return nullptr;
    }
    PyObject* mark = PyObject_CallOneArg(make_mark, step);
    if (mark == Py_None) Py_CLEAR(mark);
    return mark;
}

}  // namespace

int add_journal(PyObject* module) {
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    mark_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&mark_spec));
    journal_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&journal_spec));
    if (mark_type == nullptr || journal_type == nullptr) return -1;
    mark_of = find_mark;
    return PyModule_AddObjectRef(module, "Journal", reinterpret_cast<PyObject*>(journal_type));
}

}  // namespace amanda
