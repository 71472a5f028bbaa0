// Calls routines.
#include "steps.h"

#include <algorithm>

#include "thread.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

PyTypeObject* note_type = nullptr;
PyObject* (*mark_of)(PyObject* routine, PyObject* step) = nullptr;

namespace {

// The context of a routine: marked as such, and without recording gradients.
class InRoutine {
  public:
    InRoutine(Thread* thread, bool gradients) : depth_(thread->routine_depth), on_(gradients) {
        ++*depth_;
        if (on_) set_gradients(false);
    }
    ~InRoutine() {
        --*depth_;
        if (on_) set_gradients(true);
    }
    InRoutine(const InRoutine&) = delete;
    InRoutine& operator=(const InRoutine&) = delete;

  private:
    int64_t* depth_;
    bool on_;
};

Owned call(const ProgramStep& step, PyObject* values, bool gradients) {
    if (gradients && step.fresh) {
        PyObject* value = PyList_GET_ITEM(values, Py_ssize_t(step.positions[0]));
        return Owned(PyObject_CallOneArg(step.fresh.get(), value));
    }
    PyObject* usual[MOST_OPERANDS + 1];
    PyObject** stack = usual;
    std::vector<PyObject*> many;  // `unbind` has as many outputs as its input has rows
    size_t count = 0, given = size_t(PyList_GET_SIZE(values));
    size_t wanted = step.all ? given : step.positions.size();
    if (wanted + step.values.size() > MOST_OPERANDS) {
        many.resize(1 + wanted + step.values.size());
        stack = many.data();
    }
    for (size_t i = 0; i < wanted; ++i) {
        size_t position = step.all ? i : size_t(step.positions[i]);
        stack[1 + count++] = PyList_GET_ITEM(values, Py_ssize_t(position));
    }
    for (size_t i = 0; i < step.values.size(); ++i) stack[1 + count + i] = step.values[i].get();
    return Owned(PyObject_Vectorcall(step.routine.get(), stack + 1,
                                     count | PY_VECTORCALL_ARGUMENTS_OFFSET, step.names.get()));
}

// Adds a note with tool, routine and op to the current exception.
void annotate(Watch* watch, const ProgramStep& step) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != nullptr) PyException_SetTraceback(value, trace);
    if (watch->annotate != nullptr) {
        Owned answer(PyObject_CallFunctionObjArgs(watch->annotate, step.step.get(), value, nullptr));
        if (!answer) PyErr_Clear();
    }
    PyErr_Restore(type, value, trace);
}

bool read_step(PyObject* said, ProgramStep* step) {
    static PyObject *action_name = PyUnicode_InternFromString("action"),
                    *routine_name = PyUnicode_InternFromString("routine"),
                    *kwargs_name = PyUnicode_InternFromString("kwargs"),
                    *positions_name = PyUnicode_InternFromString("positions"),
                    *observe_name = PyUnicode_InternFromString("observe"),
                    *without_context = PyUnicode_InternFromString("__amanda_without_context__");
    Owned action(PyObject_GetAttr(said, action_name));
    if (!action) return false;
    Owned kwargs(PyObject_GetAttr(action.get(), kwargs_name)),
        positions(PyObject_GetAttr(action.get(), positions_name)),
        observe(PyObject_GetAttr(action.get(), observe_name));
    step->routine = Owned(PyObject_GetAttr(action.get(), routine_name));
    step->step = Owned::share(said);
    if (!step->routine || !kwargs || !positions || !observe) return false;
    step->edits = observe.get() != Py_True;
    Owned mark(mark_of == nullptr ? nullptr : mark_of(step->routine.get(), said));
    if (!mark && PyErr_Occurred()) return false;
    bool is_mark = bool(mark);
    Owned marked(PyObject_GetAttr(step->routine.get(), without_context));
    if (!marked) PyErr_Clear();
    step->is_note = is_mark || Py_IS_TYPE(step->routine.get(), note_type) ||
                    (!step->edits && marked.get() == Py_True);
    if (is_mark) step->routine = std::move(mark);
    step->all = positions.get() == Py_None;
    if (!PyDict_Check(kwargs.get()) || !(step->all || PyTuple_Check(positions.get()))) {
        PyErr_SetString(PyExc_TypeError, "a step needs other parts");
        return false;
    }
    for (Py_ssize_t k = 0; !step->all && k < PyTuple_GET_SIZE(positions.get()); ++k) {
        step->positions.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(positions.get(), k))));
    }
    if (is_mark || PyDict_GET_SIZE(kwargs.get()) == 0) return true;
    step->names = Owned(PyTuple_New(PyDict_GET_SIZE(kwargs.get())));
    if (!step->names) return false;
    PyObject *name, *value;
    Py_ssize_t k = 0;
    for (Py_ssize_t at = 0; PyDict_Next(kwargs.get(), &at, &name, &value); ++k) {
        PyTuple_SET_ITEM(step->names.get(), k, Py_NewRef(name));
        step->values.push_back(Owned::share(value));
    }
    return true;
}

}  // namespace

bool ProgramStep::reaches(PyObject* list) const {
    for (int position : positions) {
        if (position >= PyList_GET_SIZE(list)) return false;
    }
    return true;
}

bool ProgramStep::finds_only_none(PyObject* list) const {
    size_t wanted = all ? size_t(PyList_GET_SIZE(list)) : positions.size();
    for (size_t i = 0; i < wanted; ++i) {
        if (PyList_GET_ITEM(list, all ? Py_ssize_t(i) : positions[i]) != Py_None) return false;
    }
    return wanted != 0;
}

bool read_steps(PyObject* given, std::vector<ProgramStep>* steps) {
    Owned list(PySequence_Fast(given, "steps are a sequence"));
    if (!list) return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list.get()); ++i) {
        ProgramStep step;
        if (!read_step(PySequence_Fast_GET_ITEM(list.get(), i), &step)) return false;
        steps->push_back(std::move(step));
    }
    return true;
}

bool are_notes(const std::vector<ProgramStep>& steps) {
    return std::all_of(steps.begin(), steps.end(),
                       [](const ProgramStep& step) { return step.is_note; });
}

int visit_steps(const std::vector<ProgramStep>& steps, visitproc visit, void* arg) {
    for (const ProgramStep& step : steps) {
        Py_VISIT(step.routine.get());
        Py_VISIT(step.step.get());
        Py_VISIT(step.stamp.get());
        Py_VISIT(step.fresh.get());
        if (int stop = step.kept.traverse(visit, arg)) return stop;
        for (const Owned& value : step.values) Py_VISIT(value.get());
    }
    return 0;
}

namespace {

bool sharing = false;

// Holds the lock of a step's tool, if several threads run its routines.
class Turn {
  public:
    explicit Turn(const ProgramStep& step) {
        if (!sharing) return;
        lock_ = Owned(PyObject_GetAttrString(step.step.get(), "turn"));
        if (!lock_ || lock_.get() == Py_None) {
            lock_ = Owned();
        } else {
            // As in Python, after this long it runs nevertheless.
            Owned held(PyObject_CallMethod(lock_.get(), "acquire", "id", 1, 10.0));
            if (held.get() != Py_True) lock_ = Owned();
        }
        PyErr_Clear();
    }
    ~Turn() {
        if (!lock_) return;
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        Owned released(PyObject_CallMethod(lock_.get(), "release", nullptr));
        PyErr_Restore(type, value, trace);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

  private:
    Owned lock_;
};

}  // namespace

void set_sharing(bool value) { sharing = value; }

Owned call_step(const ProgramStep& step, PyObject* values, Thread* thread, Watch* watch,
                bool gradients) {
    Owned result;
    {
        Turn turn(step);
        InRoutine routine(thread, gradients);
        result = call(step, values, gradients);
    }
    if (!result) annotate(watch, step);
    return result;
}

Owned results(size_t before, PyObject* last) {
    Owned tuple(PyTuple_New(Py_ssize_t(before) + (last != nullptr)));
    if (!tuple) return tuple;
    for (size_t i = 0; i < before; ++i) {
        PyTuple_SET_ITEM(tuple.get(), Py_ssize_t(i), Py_NewRef(Py_None));
    }
    if (last != nullptr) PyTuple_SET_ITEM(tuple.get(), Py_ssize_t(before), Py_NewRef(last));
    return tuple;
}

}  // namespace amanda
