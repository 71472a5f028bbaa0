// Runs programs.
#include <algorithm>
#include <optional>
#include <utility>

#include "gradients/edits.h"
#include "gradients/nodes.h"
#include "programs/operator_call.h"
#include "programs/program_gradients.h"
#include "thread.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

PyObject *open_name, *inputs_name, *outputs_name, *writes_name, *destinations_name,
    *remembered_name;

PyObject* go_on(PyObject* record, Watch* watch, Definition* definition, Call& call,
                PyObject* edited, const Owned& before, const Owned& after, PyObject* returned,
                uint64_t start, bool tapped) {
    Owned args(call.args()), kwargs(call.kwargs()),
        number(PyLong_FromUnsignedLongLong(start));
    PyObject* operator_ = definition->get_operator();
    if (watch->resume == nullptr) {
        // `apply` ended inside a routine.
        return returned != nullptr ? Py_NewRef(returned) : call.original();
    }
    if (!args || !kwargs || !number || !before || !after || operator_ == nullptr) return nullptr;
    Owned resume = Owned::share(way_of(watch->resume));
    return PyObject_CallFunctionObjArgs(resume.get(), record, operator_, definition->call,
                                        args.get(), kwargs.get(), edited, before.get(), after.get(),
                                        returned != nullptr ? returned : Py_None, number.get(),
                                        tapped ? Py_True : Py_False, nullptr);
}

bool lend(ProgramParts* parts, PyObject* name, PyObject* value) {
    return PyDict_SetItem(parts->execution.get(), name, value) == 0;
}

bool lend_destinations(ProgramParts* parts, const Call& call) {
    PyObject* values[MOST_OPERANDS];
    flatten(call.operands(), values);
    Owned list(PyList_New(0));
    for (int argument : parts->outs) {
        PyObject* value = values[argument];
        bool many = PyTuple_Check(value) || PyList_Check(value);
        if (!list || (many ? PyList_SetSlice(list.get(), PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, value)
                           : PyList_Append(list.get(), value)) < 0) {
            return false;
        }
    }
    return lend(parts, destinations_name, list.get());
}

// Returns the form of a value that keeps no value alive, as `amanda_core.runtime.weak.weakly` does.
Owned weak_form(const Watch* watch, PyObject* value) {
    PyTypeObject* kind = Py_TYPE(value);
    auto* object = reinterpret_cast<PyObject*>(kind);
    if (object == watch->identity->tensor || object == watch->identity->parameter) {
        return Owned(PyObject_CallOneArg(watch->weak_value, value));
    }
    if (kind->tp_weaklistoffset == 0 && !PyType_IS_GC(kind)) return Owned::share(value);
    return Owned(PyObject_CallOneArg(watch->weakly, value));
}

// Sets what the context remembers for backward routines. False with an exception.
bool remember(const Watch* watch, PyObject* context, PyObject* execution) {
    Owned remembered(PyDict_New());
    if (!remembered) return false;
    for (PyObject* name : {inputs_name, outputs_name}) {
        PyObject* values = PyDict_GetItemWithError(execution, name);
        // Python has remembered them itself if it has continued the call.
        if (values == nullptr || !PyList_Check(values)) {
            if (name == inputs_name) return !PyErr_Occurred();
            continue;
        }
        Owned forms(PyList_New(PyList_GET_SIZE(values)));
        if (!forms) return false;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(forms.get()); ++i) {
            PyObject* form = weak_form(watch, PyList_GET_ITEM(values, i)).release();
            if (form == nullptr) return false;
            PyList_SET_ITEM(forms.get(), i, form);
        }
        if (PyDict_SetItem(remembered.get(), name, forms.get()) < 0) return false;
    }
    return PyObject_SetAttr(context, remembered_name, remembered.get()) == 0;
}

// Resets the context at the end of an execution.
class Release {
  public:
    Release(ProgramParts* parts, Watch* watch, bool gradients)
        : execution_(parts->execution),
          context_(gradients && watch->wants_backward ? parts->context : Owned()),
          watch_(Owned::share(reinterpret_cast<PyObject*>(watch))) {}
    ~Release() {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        auto* watch = reinterpret_cast<Watch*>(watch_.get());
        // Nothing is left to remember it for if `apply` ended inside a routine.
        if (context_ && watch->weakly != nullptr &&
            !remember(watch, context_.get(), execution_.get())) {
            PyErr_Clear();
        }
        // The keys stay, since the next execution fills them again.
        PyObject *name, *values;
        for (Py_ssize_t i = 0; PyDict_Next(execution_.get(), &i, &name, &values);) {
            if (values != Py_None) PyDict_SetItem(execution_.get(), name, Py_None);
        }
        PyErr_Restore(type, value, trace);
    }
    Release(const Release&) = delete;
    Release& operator=(const Release&) = delete;

  private:
    Owned execution_, context_, watch_;
};

}  // namespace

namespace {

// Sets the arguments of a call to the present values in `inputs`, by position.
void flatten_edited(const ProgramParts& parts, const Call& call, PyObject* inputs,
                    PyObject** values) {
    flatten(call.operands(), values);
    for (size_t j = 0; j < parts.sources.size(); ++j) {
        if (parts.sources[j] >= 0 && int(j) != parts.spread) {
            values[parts.sources[j]] = PyList_GET_ITEM(inputs, Py_ssize_t(j));
        }
    }
}

// Calls the original with the present values in `inputs`.
Owned call_edited(const ProgramParts& parts, Call& call, PyObject* inputs) {
    PyObject* values[MOST_OPERANDS + 1];
    values[0] = nullptr;  // The callee may use the place before the first argument.
    flatten_edited(parts, call, inputs, values + 1);
    return Owned(call.original_with(values + 1));
}

// Returns true if edits can be applied here. Python does so if they change which gradients are
// `hooked`, or if the user's modes would see it.
bool may_edit(const ProgramParts& parts, const Watch* watch, bool hooked) {
    return !parts.writes && parts.outs.empty() && !hooked && watch->edit != nullptr &&
           !in_function_modes();
}

// Returns true if everything that a routine may change was passed as one argument.
bool are_given(const ProgramParts& parts, const ProgramStep& step) {
    auto is_given = [&](int position) {
        return parts.sources[size_t(position)] >= 0 && position != parts.spread;
    };
    if (!step.all) {
        return std::all_of(step.positions.begin(), step.positions.end(), is_given);
    }
    for (size_t j = 0; j < parts.sources.size(); ++j) {
        if (!is_given(int(j))) return false;
    }
    return true;
}

// The most memoized routines whose results a call takes without calling any.
constexpr size_t MOST_KEPT = 4;

// Calls the original with the kept results of all routines in `result`. False if one of them has to
// be called.
bool call_with_kept(const ProgramParts& parts, const Watch* watch, Call& call, Owned* result) {
    if (!may_edit(parts, watch, false) || is_observed()) return false;
    PyObject* values[MOST_OPERANDS + 1];
    values[0] = nullptr;  // The callee may use the place before the first argument.
    flatten(call.operands(), values + 1);
    Owned held[MOST_KEPT];  // The call may run anything, even another program of this op.
    for (size_t i = 0; i < parts.before.size(); ++i) {
        const ProgramStep& step = parts.before[i];
        PyObject*& value = values[1 + parts.sources[size_t(step.positions[0])]];
        PyObject* kept = step.kept.replacement(step.stamp.get(), value);
        if (kept == nullptr) return false;
        held[i] = Owned::share(kept);
        value = kept;
    }
    *result = Owned(call.original_with(values + 1));
    return true;
}

// Returns true if `call_with_kept` may be tried, in calls without gradients.
bool is_memoized(const ProgramParts& parts) {
    return !parts.before.empty() && parts.before.size() <= MOST_KEPT && parts.after.empty() &&
           std::all_of(parts.before.begin(), parts.before.end(), [&](const ProgramStep& step) {
               return step.stamp && are_given(parts, step);
           });
}

}  // namespace

namespace {

// Returns true if a list or tuple contains only tensors and values of Python's own types, at any
// depth. It might otherwise contain fake tensors of a tracer.
bool holds_plain(const Watch* watch, PyObject* sequence) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(sequence, i);
        auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(item));
        if (kind == watch->identity->tensor || kind == watch->identity->parameter) continue;
        if (PyList_Check(item) || PyTuple_Check(item)) {
            if (!holds_plain(watch, item)) return false;
        } else if (PyType_HasFeature(Py_TYPE(item), Py_TPFLAGS_HEAPTYPE)) {
            return false;
        }
    }
    return true;
}

INLINE bool may_hold_stand_in(const Watch* watch, PyObject* value) {
    return (PyList_Check(value) || PyTuple_Check(value)) && !holds_plain(watch, value);
}

}  // namespace

namespace {

// Returns true if the nodes of an op that computes with the values in `inputs` can be hooked as
// those of the call from which the program was made.
bool fits_edited(const ProgramParts& parts, const Watch* watch, const Call& call,
                 PyObject* inputs) {
    PyObject* values[MOST_OPERANDS];
    flatten_edited(parts, call, inputs, values);
    for (size_t i = 0; i < parts.types.size(); ++i) {
        auto* was = reinterpret_cast<PyObject*>(parts.types[i]);
        auto* is = reinterpret_cast<PyObject*>(Py_TYPE(values[i]));
        bool plain = was == watch->identity->parameter && is == watch->identity->tensor;
        if ((was != is && !plain) || may_hold_stand_in(watch, values[i])) return false;
    }
    return requires_the_same(parts, values) && (!parts.meets || laid_the_same(parts, values));
}

// Returns true if two attributes of the same type are equal. Those that may be equal and still differ
// (-0.0), or are symbols, must be the same object.
bool is_fixed(PyObject* value, PyObject* expected) {
    if (value == expected) return true;
    if (PyFloat_Check(value) || PyComplex_Check(value) ||
        PyType_HasFeature(Py_TYPE(value), Py_TPFLAGS_HEAPTYPE)) {
        return false;
    }
    int same = PyObject_RichCompareBool(value, expected, Py_EQ);  // Each `x.device` is an object.
    if (same < 0) PyErr_Clear();
    return same == 1;
}

}  // namespace

bool fits(const Program* program, const Watch* watch, PyObject* record, const Call& call,
          bool gradients) {
    const ProgramParts& parts = *program->parts;
    const Operands& operands = call.operands();
    if (parts.epoch.get() != watch->epoch) return false;
    if (gradients) {
        bool tracked = watch->wants_backward && parts.nodes < 0;
        if (!can_set_gradients() || !parts.with_gradients ||
            (tracked && !may_hook(watch, record)) ||
            (!parts.taps.empty() && !call.takes_others())) {
            return false;
        }
        // The user's modes must not see the hooks.
        if ((tracked || parts.hooks_gradients()) && in_function_modes()) {
            return false;
        }
    }
    size_t shift = operands.first != nullptr, count = size_t(operands.count) + shift;
    size_t named = size_t(operands.named());
    if (count + named != parts.types.size() || named != parts.keywords.size()) return false;
    if (shift && Py_TYPE(operands.first) != parts.types[0]) return false;
    for (size_t i = shift; i < count; ++i) {
        PyObject* value = operands.items[i - shift];
        if (Py_TYPE(value) != parts.types[i] || may_hold_stand_in(watch, value)) return false;
    }
    for (size_t k = 0; operands.names != nullptr && k < named; ++k) {
        PyObject* value = operands.items[size_t(operands.count) + k];
        // Argument names in code are interned, so comparing addresses is enough.
        if (PyTuple_GET_ITEM(operands.names, Py_ssize_t(k)) != parts.keywords[k].get() ||
            Py_TYPE(value) != parts.types[count + k] || may_hold_stand_in(watch, value)) {
            return false;
        }
    }
    if (operands.kwargs != nullptr && named != 0) {
        PyObject *name, *value;
        size_t k = 0;
        for (Py_ssize_t i = 0; PyDict_Next(operands.kwargs, &i, &name, &value); ++k) {
            if (name != parts.keywords[k].get() || Py_TYPE(value) != parts.types[count + k] ||
                may_hold_stand_in(watch, value)) {
                return false;
            }
        }
    }
    PyObject* values[MOST_OPERANDS];
    if (!parts.fixed.empty()) {
        flatten(operands, values);
        for (const auto& [argument, value] : parts.fixed) {
            if (!is_fixed(values[argument], value.get())) return false;
        }
    }
    if (gradients && parts.saved_hooks) {
        Owned hooks(PyObject_CallOneArg(parts.saved_hooks.get(), Py_True));
        if (hooks.get() != Py_None) {
            PyErr_Clear();
            return false;
        }
    }
    if (gradients && (!parts.required.empty() || parts.in_place || parts.meets)) {
        flatten(operands, values);
        if (!requires_the_same(parts, values)) return false;
        if (parts.meets && !laid_the_same(parts, values)) return false;
    }
    return !in_stand_ins();
}

namespace {

// Returns the inputs by position. Null with an exception.
Owned inputs_of(const ProgramParts* parts, const Call& call) {
    const Operands& operands = call.operands();
    size_t shift = operands.first != nullptr, count = size_t(operands.count) + shift;
    Owned inputs(PyList_New(Py_ssize_t(parts->sources.size())));
    if (!inputs) return Owned();
    for (size_t j = 0; j < parts->sources.size(); ++j) {
        PyObject* value;
        int source = parts->sources[j];
        if (source < 0) {
            value = parts->defaults[j].get();
            if (PyList_Check(value)) {
                // A routine may write it.
                Owned copy(PyList_GetSlice(value, 0, PyList_GET_SIZE(value)));
                if (!copy) return Owned();
                PyList_SET_ITEM(inputs.get(), Py_ssize_t(j), copy.release());
                continue;
            }
        } else if (int(j) == parts->spread) {
            Owned rest(PyTuple_New(Py_ssize_t(count) - source));
            if (!rest) return Owned();
            for (size_t i = size_t(source); i < count; ++i) {
                PyTuple_SET_ITEM(rest.get(), Py_ssize_t(i) - source,
                                 Py_NewRef(shift && i == 0 ? operands.first
                                                           : operands.items[i - shift]));
            }
            PyList_SET_ITEM(inputs.get(), Py_ssize_t(j), rest.release());
            continue;
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
    return inputs;
}

// Lends the context what its routines may read. False with an exception.
bool open_context(ProgramParts* parts, const Call& call, PyObject* inputs) {
    return lend(parts, inputs_name, inputs) &&
           (!parts->writes || lend(parts, writes_name, parts->writes.get())) &&
           (parts->outs.empty() || lend_destinations(parts, call)) &&
           PyDict_SetItem(parts->execution.get(), open_name, Py_True) == 0;
}

// Returns true if no routine reads the context, now or in the backward pass.
bool runs_closed(const ProgramParts* parts, const Watch* watch, PyObject* record, bool gradients) {
    return !parts->needs_context && (!gradients || !watch->wants_backward || parts->nodes >= 0 ||
                                     may_hook_notes(watch, record));
}

}  // namespace

PyObject* run_program(Program* program, PyObject* record, Thread* thread, Watch* watch,
                      Definition* definition, Call& call, bool gradients) {
    Owned kept = Owned::share(reinterpret_cast<PyObject*>(program));
    ProgramParts* parts = program->parts;
    // A routine of the backward program may ask for values of this execution.
    if (!gradients && !watch->wants_backward && call.takes_others() && is_memoized(*parts)) {
        Owned result;
        if (call_with_kept(*parts, watch, call, &result)) return result.release();
    }
    // Without routines, nothing reads the context.
    bool reads = !parts->before.empty() || !parts->after.empty() || parts->assigns ||
                 (gradients && watch->wants_backward);
    bool opens = reads && !runs_closed(parts, watch, record, gradients);
    std::optional<Release> release;
    Owned inputs = reads ? inputs_of(parts, call) : Owned();
    if (reads && !inputs) return nullptr;
    if (opens) {
        release.emplace(parts, watch, gradients);
        if (!open_context(parts, call, inputs.get())) return nullptr;
    } else if (reads && gradients && parts->remembers) {
        // An earlier execution has other values.
        parts->remembers = false;
        Owned nothing(PyDict_New());
        if (!nothing || (parts->context && PyObject_SetAttr(parts->context.get(), remembered_name,
                                                            nothing.get()) < 0)) {
            return nullptr;
        }
    }
    Edits before, after;
    Meetings meetings;
    // Routines at the gradients of inputs run after those at the op's own nodes.
    auto meet = [&](PyObject* returned, uint64_t start) {
        Meetings found = std::exchange(meetings, {});
        return hook_meetings(*parts, call, returned, start, found);
    };
    auto go_on_from = [&](const Owned& done_before, const Owned& done_after, PyObject* returned,
                          uint64_t start, bool tapped = true) -> PyObject* {
        if (!meet(returned, start)) return nullptr;
        PyObject* edited = returned != nullptr && before.any() ? inputs.get() : Py_None;
        return go_on(record, watch, definition, call, edited, done_before, done_after, returned,
                     start, tapped);
    };
    size_t all = parts->before.size();
    bool hooked = gradients && parts->hooks_gradients();
    for (size_t i = 0; i < all; ++i) {
        ProgramStep& step = parts->before[i];
        // The user's modes and the profiler must not see how a tensor is read.
        bool memoized = step.stamp && !in_function_modes() && !is_observed();
        PyObject* known = nullptr;
        if (memoized) {
            PyObject* value = PyList_GET_ITEM(inputs.get(), step.positions[0]);
            known = step.kept.look_up(step.stamp.get(), value);
            // A program that trains mostly writes its weights before they are read again.
            if (known == nullptr) step.kept.begin(step.stamp.get(), value, gradients);
        }
        Owned result = known != nullptr ? Owned::share(known)
                                        : call_step(step, inputs.get(), thread, watch, gradients);
        if (!result) return nullptr;
        if (result.get() == Py_None) continue;
        if (!may_edit(*parts, watch, gradients && !parts->taps.empty()) ||
            !are_given(*parts, step) || !call.takes_others()) {
            return go_on_from(before.so_far(i, result.get()), after.so_far(0), nullptr, 0);
        }
        uint64_t unedited = hooked ? next_sequence_number() : 0;
        if (!before.make(watch, step, i, inputs.get(), result.get(), parts->aliases, gradients)) {
            return is_skipped(watch, definition->type.name) ? call.original() : nullptr;
        }
        if (hooked && (next_sequence_number() != unedited ||
                       !fits_edited(*parts, watch, call, inputs.get()))) {
            return go_on_from(before.so_far(i + 1), after.so_far(0), nullptr, 0);
        }
        if (memoized) {
            PyObject* value = PyList_GET_ITEM(inputs.get(), step.positions[0]);
            step.kept.end(result.get(), gradients ? nullptr : value);
        }
    }
    uint64_t start = gradients ? next_sequence_number() : 0;
    Owned returned = gradients && !parts->taps.empty() ? call_tapped(*parts, watch, call)
                     : before.any()                    ? call_edited(*parts, call, inputs.get())
                                                       : Owned(call.original());
    if (!returned || returned.get() == Py_NotImplemented) return returned.release();
    if (parts->assigns) returned = Owned::share(PyList_GET_ITEM(inputs.get(), 0));
    bool tensor = reinterpret_cast<PyObject*>(Py_TYPE(returned.get())) == watch->identity->tensor;
    PyObject* unhooked = nullptr;  // the record, if nodes of this execution need hooks
    if (gradients) {
        if (watch->wants_backward && next_sequence_number() - start != uint64_t(parts->nodes)) {
            unhooked = record;
        }
        // Python does the rest: everything, or everything except the gradients of inputs.
        int met = arrives_the_same(*parts, call, returned.get());
        if (met == 1 && parts->meets) {
            // Python may set the hooks of nodes later, before those that it has registered.
            bool in_graph = unhooked == nullptr || !hooks_later(watch, record);
            met = find_meetings(*parts, returned.get(), start, in_graph, &meetings);
        }
        if (met < 0) return nullptr;
        if (met == 0) {
            meetings = {};
            return go_on_from(before.so_far(all), after.so_far(0), returned.get(), start,
                              !parts->taps.empty());
        }
    }
    auto finish = [&]() -> PyObject* {
        if (unhooked != nullptr) {
            int hooked = hook_record(watch, unhooked, returned.get(), start);
            if (hooked < 0) return nullptr;
            if (hooked == 0) {
                return go_on_from(before.so_far(all), after.so_far(parts->after.size()),
                                  returned.get(), start);
            }
        }
        if (!meet(returned.get(), start)) return nullptr;
        if (gradients && !hook_arrivals(*parts, returned.get())) return nullptr;
        return returned.release();
    };
    if (parts->after.empty()) return finish();
    Owned outputs;
    if (PyTuple_Check(returned.get()) || PyList_Check(returned.get())) {
        outputs = Owned(PySequence_List(returned.get()));
    } else if ((outputs = Owned(PyList_New(1)))) {
        PyList_SET_ITEM(outputs.get(), 0, Py_NewRef(returned.get()));
    }
    if (!outputs || (opens && !lend(parts, outputs_name, outputs.get()))) return nullptr;
    if (PyList_GET_SIZE(outputs.get()) != parts->outputs) {  // It is analysed for this number, too.
        return go_on_from(before.so_far(all), after.so_far(0), returned.get(), start);
    }
    for (size_t i = 0; i < parts->after.size(); ++i) {
        const ProgramStep& step = parts->after[i];
        if (!step.reaches(outputs.get())) {
            return go_on_from(before.so_far(all), after.so_far(i), returned.get(), start);
        }
        Owned result = call_step(step, outputs.get(), thread, watch, gradients);
        if (!result) return nullptr;
        if (result.get() == Py_None) continue;
        if (!may_edit(*parts, watch, hooked) || !tensor || unhooked != nullptr ||
            collects(returned.get())) {
            return go_on_from(before.so_far(all), after.so_far(i, result.get()), returned.get(),
                              start);
        }
        if (!after.make(watch, step, i, outputs.get(), result.get(), parts->aliases, gradients)) {
            return is_skipped(watch, definition->type.name) ? returned.release() : nullptr;
        }
    }
    return after.any() ? Py_NewRef(PyList_GET_ITEM(outputs.get(), 0)) : finish();
}

void name_strings() {
    open_name = PyUnicode_InternFromString("open");
    inputs_name = PyUnicode_InternFromString("inputs");
    outputs_name = PyUnicode_InternFromString("outputs");
    writes_name = PyUnicode_InternFromString("writes");
    destinations_name = PyUnicode_InternFromString("destinations");
    remembered_name = PyUnicode_InternFromString("remembered");
    name_gradient_strings();
}

}  // namespace amanda
