// The running of programs.
#include "program.h"

#include "redirect.h"
#include "thread.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

struct ProgramParts {
    Owned epoch;
    std::vector<PyTypeObject*> types;  // of the arguments; held by `kinds`
    std::vector<Owned> kinds;
    std::vector<Owned> keywords;
    // Position of the signature -> argument by number, or -1 and the default.
    std::vector<int> sources;
    std::vector<Owned> defaults;
    std::vector<ProgramStep> before, after;
    Owned state, values;  // the context's attributes and its values
    Owned constant;       // gives constants by position
    long nodes = -1;      // that the op makes, if these need nothing; else -1
    // Gradients of inputs: identities that hand them to a function together.
    struct Tap {
        Owned function;
        std::vector<int> arguments;  // by number
    };
    std::vector<Tap> taps;
    std::vector<int> required;  // by argument: whether it requires a gradient; -1 for no tensor
};

namespace {

PyTypeObject* program_type = nullptr;
PyObject *released, *inputs_name, *outputs_name, *constant_name, *requires_grad;

// Extent of a routine: marked, and without gradients.
class InRoutine {
  public:
    InRoutine(Thread* thread, bool gradients) : depth_(routine_depth(thread)), on_(gradients) {
        *depth_ = PyLong_FromLong(1);  // 0 and 1 are shared, and never die.
        if (on_) set_gradients(false);
    }
    ~InRoutine() {
        PyObject* one = *depth_;
        *depth_ = PyLong_FromLong(0);
        Py_DECREF(one);
        if (on_) set_gradients(true);
    }
    InRoutine(const InRoutine&) = delete;
    InRoutine& operator=(const InRoutine&) = delete;

  private:
    PyObject** depth_;
    bool on_;
};

Owned call_step(const ProgramStep& step, PyObject* values) {
    constexpr size_t MOST = 24;
    PyObject* stack[MOST + 1];
    size_t count = 0, given = size_t(PyList_GET_SIZE(values));
    size_t wanted = step.all ? given : step.positions.size();
    if (wanted + step.values.size() > MOST) {
        PyErr_SetString(PyExc_OverflowError, "too many values");
        return Owned();
    }
    for (size_t i = 0; i < wanted; ++i) {
        size_t position = step.all ? i : size_t(step.positions[i]);
        stack[1 + count++] = PyList_GET_ITEM(values, Py_ssize_t(position));
    }
    for (size_t i = 0; i < step.values.size(); ++i) stack[1 + count + i] = step.values[i].get();
    return Owned(PyObject_Vectorcall(step.routine.get(), stack + 1,
                                     count | PY_VECTORCALL_ARGUMENTS_OFFSET, step.names.get()));
}

bool reaches(const ProgramStep& step, PyObject* values) {
    for (int position : step.positions) {
        if (position >= PyList_GET_SIZE(values)) return false;
    }
    return true;
}

// Adds the note that names tool, routine and op to the current exception.
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

// Results of routines so far: None for each that changed nothing, and the one that did something.
Owned results(size_t before, PyObject* last) {
    Owned tuple(PyTuple_New(Py_ssize_t(before) + (last != nullptr)));
    if (!tuple) return tuple;
    for (size_t i = 0; i < before; ++i) {
        PyTuple_SET_ITEM(tuple.get(), Py_ssize_t(i), Py_NewRef(Py_None));
    }
    if (last != nullptr) PyTuple_SET_ITEM(tuple.get(), Py_ssize_t(before), Py_NewRef(last));
    return tuple;
}

PyObject* go_on(PyObject* record, Watch* watch, Definition* definition, Call& call,
                const Owned& before, const Owned& after, PyObject* returned, uint64_t start) {
    Owned args(call.args()), kwargs(call.kwargs()),
        number(PyLong_FromUnsignedLongLong(start));
    PyObject* operator_ = definition->get_operator();
    if (watch->resume == nullptr) {
        // The tools were left inside a routine.
        return returned != nullptr ? Py_NewRef(returned) : call.original();
    }
    if (!args || !kwargs || !number || !before || !after || operator_ == nullptr) return nullptr;
    Owned resume = Owned::share(watch->resume);
    return PyObject_CallFunctionObjArgs(resume.get(), record, operator_, definition->call,
                                        args.get(), kwargs.get(), before.get(), after.get(),
                                        returned != nullptr ? returned : Py_None, number.get(),
                                        nullptr);
}

bool lend(ProgramParts* parts, PyObject* name, PyObject* list) {
    return PyDict_SetItem(parts->values.get(), name, list) == 0;
}

// The context at the end of an execution.
class Release {
  public:
    explicit Release(ProgramParts* parts) : state_(parts->state), values_(parts->values) {}
    ~Release() {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyDict_Clear(values_.get());
        PyDict_SetItem(state_.get(), released, Py_True);
        PyErr_Restore(type, value, trace);
    }
    Release(const Release&) = delete;
    Release& operator=(const Release&) = delete;

  private:
    Owned state_, values_;
};

}  // namespace

bool is_program(PyObject* object) { return object != nullptr && Py_TYPE(object) == program_type; }

namespace {

// Whether values may be stand-ins for tensors now; then Python says what to do.
bool stood_in(const Watch* watch) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watch->stand_ins); ++i) {
        Owned answer(PyObject_CallNoArgs(PyTuple_GET_ITEM(watch->stand_ins, i)));
        if (!answer || PyObject_IsTrue(answer.get()) != 0) {
            PyErr_Clear();
            return true;
        }
    }
    return false;
}

// Whether the arguments that require a gradient are those that the program knows.
bool requires_the_same(const ProgramParts& parts, PyObject* const* values) {
    for (size_t i = 0; i < parts.required.size(); ++i) {
        if (parts.required[i] < 0) continue;
        Owned answer(PyObject_GetAttr(values[i], requires_grad));
        if (!answer) PyErr_Clear();
        if (answer.get() != (parts.required[i] ? Py_True : Py_False)) return false;
    }
    return true;
}

constexpr size_t MOST_OPERANDS = 24;

// The operands one after the other.
size_t flatten(const Operands& operands, PyObject** values) {
    size_t count = 0;
    if (operands.first != nullptr) values[count++] = operands.first;
    for (Py_ssize_t i = 0; i < operands.count; ++i) values[count++] = operands.items[i];
    for (Py_ssize_t i = 0; operands.names != nullptr && i < operands.named(); ++i) {
        values[count++] = operands.items[operands.count + i];
    }
    if (operands.kwargs != nullptr) {
        PyObject *name, *value;
        for (Py_ssize_t i = 0; PyDict_Next(operands.kwargs, &i, &name, &value);) {
            values[count++] = value;
        }
    }
    return count;
}

// The original on identities of those operands whose gradients are wanted.
Owned call_tapped(const ProgramParts& parts, Watch* watch, Call& call) {
    PyObject* values[MOST_OPERANDS + 1];
    values[0] = nullptr;  // The place before the first is the callee's to use.
    PyObject** operands = values + 1;
    flatten(call.operands(), operands);
    std::vector<Owned> held;
    for (const ProgramParts::Tap& tap : parts.taps) {
        Owned wanted(PyTuple_New(Py_ssize_t(tap.arguments.size())));
        if (!wanted) return Owned();
        for (size_t i = 0; i < tap.arguments.size(); ++i) {
            PyTuple_SET_ITEM(wanted.get(), Py_ssize_t(i), Py_NewRef(operands[tap.arguments[i]]));
        }
        Owned identities(
            PyObject_CallFunctionObjArgs(watch->tap, wanted.get(), tap.function.get(), nullptr));
        if (!identities) return Owned();
        if (!PyTuple_Check(identities.get()) ||
            PyTuple_GET_SIZE(identities.get()) != Py_ssize_t(tap.arguments.size())) {
            PyErr_SetString(PyExc_SystemError, "a tap returned something else");
            return Owned();
        }
        for (size_t i = 0; i < tap.arguments.size(); ++i) {
            operands[tap.arguments[i]] = PyTuple_GET_ITEM(identities.get(), Py_ssize_t(i));
        }
        held.push_back(std::move(identities));
    }
    return Owned(call.original_with(operands));
}

}  // namespace

bool fits(const Program* program, const Watch* watch, const Call& call, bool gradients) {
    const ProgramParts& parts = *program->parts;
    const Operands& operands = call.operands();
    if (parts.epoch.get() != watch->epoch) return false;
    if (gradients && (!can_set_gradients() || (watch->wants_backward && parts.nodes < 0))) {
        return false;
    }
    if (gradients && !parts.required.empty() && !call.takes_others()) return false;
    size_t shift = operands.first != nullptr, count = size_t(operands.count) + shift;
    size_t named = size_t(operands.named());
    if (count + named != parts.types.size() || named != parts.keywords.size()) return false;
    if (shift && Py_TYPE(operands.first) != parts.types[0]) return false;
    for (size_t i = shift; i < count; ++i) {
        if (Py_TYPE(operands.items[i - shift]) != parts.types[i]) return false;
    }
    for (size_t k = 0; operands.names != nullptr && k < named; ++k) {
        PyObject* value = operands.items[size_t(operands.count) + k];
        // Argument names in code are interned.
        if (PyTuple_GET_ITEM(operands.names, Py_ssize_t(k)) != parts.keywords[k].get() ||
            Py_TYPE(value) != parts.types[count + k]) {
            return false;
        }
    }
    if (operands.kwargs != nullptr && named != 0) {
        PyObject *name, *value;
        size_t k = 0;
        for (Py_ssize_t i = 0; PyDict_Next(operands.kwargs, &i, &name, &value); ++k) {
            if (name != parts.keywords[k].get() || Py_TYPE(value) != parts.types[count + k]) {
                return false;
            }
        }
    }
    if (gradients && !parts.required.empty()) {
        PyObject* values[MOST_OPERANDS];
        flatten(operands, values);
        if (!requires_the_same(parts, values)) return false;
    }
    return !stood_in(watch);
}

PyObject* run_program(Program* program, PyObject* record, Thread* thread, Watch* watch,
                      Definition* definition, Call& call, bool gradients) {
    Owned kept = Owned::share(reinterpret_cast<PyObject*>(program));
    ProgramParts* parts = program->parts;
    Release release(parts);
    const Operands& operands = call.operands();
    size_t shift = operands.first != nullptr, count = size_t(operands.count) + shift;
    Owned inputs(PyList_New(Py_ssize_t(parts->sources.size())));
    if (!inputs) return nullptr;
    for (size_t j = 0; j < parts->sources.size(); ++j) {
        PyObject* value;
        int source = parts->sources[j];
        if (source < 0) {
            value = parts->defaults[j].get();
        } else if (size_t(source) < count) {
            value = shift && source == 0 ? operands.first : operands.items[size_t(source) - shift];
        } else if (operands.names != nullptr) {
            value = operands.items[size_t(source) - shift];
        } else {
            value = PyDict_GetItemWithError(operands.kwargs,
                                            parts->keywords[size_t(source) - count].get());
        }
        PyList_SET_ITEM(inputs.get(), Py_ssize_t(j), Py_NewRef(value));
    }
    if (!lend(parts, inputs_name, inputs.get()) ||
        PyDict_SetItem(parts->state.get(), released, Py_False) < 0 ||
        PyDict_SetItem(parts->state.get(), constant_name, parts->constant.get()) < 0) {
        return nullptr;
    }
    for (size_t i = 0; i < parts->before.size(); ++i) {
        Owned result;
        {
            InRoutine routine(thread, gradients);
            result = call_step(parts->before[i], inputs.get());
        }
        if (!result) {
            annotate(watch, parts->before[i]);
            return nullptr;
        }
        if (result.get() != Py_None) {
            return go_on(record, watch, definition, call, results(i, result.get()), results(0, nullptr),
                         nullptr, 0);
        }
    }
    uint64_t start = gradients ? next_sequence_number() : 0;
    Owned returned = gradients && !parts->taps.empty() ? call_tapped(*parts, watch, call)
                                                       : Owned(call.original());
    if (!returned || returned.get() == Py_NotImplemented) return returned.release();
    bool settled = !gradients || !watch->wants_backward ||
                   next_sequence_number() - start == uint64_t(parts->nodes);
    if (!settled) {
        return go_on(record, watch, definition, call, results(parts->before.size(), nullptr),
                     results(0, nullptr), returned.get(), start);
    }
    if (parts->after.empty()) return returned.release();
    Owned outputs;
    if (PyTuple_Check(returned.get()) || PyList_Check(returned.get())) {
        outputs = Owned(PySequence_List(returned.get()));
    } else if ((outputs = Owned(PyList_New(1)))) {
        PyList_SET_ITEM(outputs.get(), 0, Py_NewRef(returned.get()));
    }
    if (!outputs || !lend(parts, outputs_name, outputs.get())) return nullptr;
    for (size_t i = 0; i < parts->after.size(); ++i) {
        Owned result;
        if (!reaches(parts->after[i], outputs.get())) {
            return go_on(record, watch, definition, call, results(parts->before.size(), nullptr),
                         results(i, nullptr), returned.get(), start);
        }
        {
            InRoutine routine(thread, gradients);
            result = call_step(parts->after[i], outputs.get());
        }
        if (!result) {
            annotate(watch, parts->after[i]);
            return nullptr;
        }
        if (result.get() != Py_None) {
            return go_on(record, watch, definition, call, results(parts->before.size(), nullptr),
                         results(i, result.get()), returned.get(), start);
        }
    }
    return returned.release();
}

namespace {

bool read_steps(PyObject* list, std::vector<ProgramStep>* steps) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        PyObject *routine, *kwargs, *positions, *step;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "OO!OO", &routine, &PyDict_Type, &kwargs,
                              &positions, &step)) {
            return false;
        }
        ProgramStep made;
        made.routine = Owned::share(routine);
        made.step = Owned::share(step);
        made.all = positions == Py_None;
        if (!made.all) {
            for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(positions); ++k) {
                made.positions.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(positions, k))));
            }
        }
        if (PyDict_GET_SIZE(kwargs) != 0) {
            made.names = Owned(PyTuple_New(PyDict_GET_SIZE(kwargs)));
            if (!made.names) return false;
            PyObject *name, *value;
            Py_ssize_t k = 0;
            for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value); ++k) {
                PyTuple_SET_ITEM(made.names.get(), k, Py_NewRef(name));
                made.values.push_back(Owned::share(value));
            }
        }
        steps->push_back(std::move(made));
    }
    return true;
}

PyObject* program_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *epoch, *types, *keywords, *sources, *defaults, *before, *after, *state, *values,
        *constant, *taps, *required;
    long nodes;
    if (!PyArg_ParseTuple(args, "OO!O!O!O!O!O!O!O!OlO!O!", &epoch, &PyTuple_Type, &types,
                          &PyTuple_Type, &keywords, &PyTuple_Type, &sources, &PyTuple_Type,
                          &defaults, &PyList_Type, &before, &PyList_Type, &after, &PyDict_Type,
                          &state, &PyDict_Type, &values, &constant, &nodes, &PyList_Type, &taps,
                          &PyTuple_Type, &required)) {
        return nullptr;
    }
    Owned self(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    auto* parts = reinterpret_cast<Program*>(self.get())->parts = new ProgramParts;
    parts->epoch = Owned::share(epoch);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
        parts->kinds.push_back(Owned::share(PyTuple_GET_ITEM(types, i)));
        parts->types.push_back(reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(types, i)));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keywords); ++i) {
        PyObject* name = Py_NewRef(PyTuple_GET_ITEM(keywords, i));
        PyUnicode_InternInPlace(&name);
        parts->keywords.emplace_back(name);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); ++i) {
        parts->sources.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(sources, i))));
        parts->defaults.push_back(Owned::share(PyTuple_GET_ITEM(defaults, i)));
    }
    parts->state = Owned::share(state);
    parts->values = Owned::share(values);
    parts->constant = Owned::share(constant);
    parts->nodes = nodes;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(taps); ++i) {
        PyObject *function, *arguments;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(taps, i), "OO!", &function, &PyTuple_Type,
                              &arguments)) {
            return nullptr;
        }
        ProgramParts::Tap tap;
        tap.function = Owned::share(function);
        for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(arguments); ++k) {
            tap.arguments.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(arguments, k))));
        }
        parts->taps.push_back(std::move(tap));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(required); ++i) {
        parts->required.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(required, i))));
    }
    if (parts->types.size() > MOST_OPERANDS) {
        PyErr_SetString(PyExc_OverflowError, "too many operands");
        return nullptr;
    }
    if (!read_steps(before, &parts->before) || !read_steps(after, &parts->after)) return nullptr;
    return self.release();
}

void program_dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    delete reinterpret_cast<Program*>(self)->parts;
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

int program_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    ProgramParts* parts = reinterpret_cast<Program*>(self)->parts;
    if (parts == nullptr) return 0;
    auto each = [&](const std::vector<ProgramStep>& steps) {
        for (const ProgramStep& step : steps) {
            Py_VISIT(step.routine.get());
            Py_VISIT(step.step.get());
            for (const Owned& value : step.values) Py_VISIT(value.get());
        }
        return 0;
    };
    if (int stop = each(parts->before)) return stop;
    if (int stop = each(parts->after)) return stop;
    Py_VISIT(parts->state.get());
    Py_VISIT(parts->values.get());
    Py_VISIT(parts->constant.get());
    for (const ProgramParts::Tap& tap : parts->taps) Py_VISIT(tap.function.get());
    return 0;
}

int program_clear(PyObject* self) {
    auto* program = reinterpret_cast<Program*>(self);
    if (program->parts == nullptr) return 0;
    auto* empty = new ProgramParts;
    std::swap(program->parts, empty);
    delete empty;
    return 0;
}

PyType_Slot program_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(program_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(program_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(program_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(program_clear)},
    {Py_tp_doc, const_cast<char*>("The plan of one op, in the form in which C runs it.")},
    {0, nullptr},
};
PyType_Spec program_spec = {"amanda_driver_torch._native.Program", sizeof(Program), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, program_slots};

}  // namespace

int add_program(PyObject* module) {
    released = PyUnicode_InternFromString("_released");
    inputs_name = PyUnicode_InternFromString("inputs");
    outputs_name = PyUnicode_InternFromString("outputs");
    constant_name = PyUnicode_InternFromString("_constant");
    requires_grad = PyUnicode_InternFromString("requires_grad");
    program_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&program_spec));
    if (program_type == nullptr) return -1;
    return PyModule_AddObjectRef(module, "Program", reinterpret_cast<PyObject*>(program_type));
}

}  // namespace amanda
