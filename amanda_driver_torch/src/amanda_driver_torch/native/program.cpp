// The running of programs.
#include <algorithm>

#include "program_parts.h"
#include "redirect.h"
#include "thread.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

PyObject *released, *inputs_name, *outputs_name, *constant_name, *requires_grad, *ndim,
    *dtype_name, *is_contiguous, *shape_name;

PyObject* go_on(PyObject* record, Watch* watch, Definition* definition, Call& call,
                const Owned& before, const Owned& after, PyObject* returned, uint64_t start,
                bool tapped = true) {
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
                                        tapped ? Py_True : Py_False, nullptr);
}

bool lend(ProgramParts* parts, PyObject* name, PyObject* list) {
    return PyDict_SetItem(parts->values.get(), name, list) == 0;
}

// The context at the end of an execution.
class Release {
  public:
    Release(ProgramParts* parts, Watch* watch)
        : state_(parts->state), values_(parts->values),
          remember_(watch->wants_backward ? parts->remember : Owned()) {}
    ~Release() {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (remember_) {
            if (!Owned(PyObject_CallNoArgs(remember_.get()))) PyErr_Clear();
        }
        PyDict_Clear(values_.get());
        PyDict_SetItem(state_.get(), released, Py_True);
        PyErr_Restore(type, value, trace);
    }
    Release(const Release&) = delete;
    Release& operator=(const Release&) = delete;

  private:
    Owned state_, values_, remember_;
};

}  // namespace

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

// The original on identities of those operands whose gradients are wanted. Where it hands one of
// them back, it has done nothing: the operand itself comes back.
Owned call_tapped(const ProgramParts& parts, Watch* watch, Call& call) {
    PyObject* values[MOST_OPERANDS + 1];
    values[0] = nullptr;  // The place before the first is the callee's to use.
    PyObject** operands = values + 1;
    flatten(call.operands(), operands);
    std::vector<Owned> held, tapped;
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
        tapped.push_back(std::move(wanted));
    }
    Owned returned(call.original_with(operands));
    for (size_t i = 0; returned && i < held.size(); ++i) {
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(held[i].get()); ++j) {
            if (PyTuple_GET_ITEM(held[i].get(), j) == returned.get()) {
                return Owned(Py_NewRef(PyTuple_GET_ITEM(tapped[i].get(), j)));
            }
        }
    }
    return returned;
}

// Whether the arguments lie as they did when it was found where their gradients meet.
bool laid_the_same(const ProgramParts& parts, PyObject* const* values) {
    Owned cast(PyObject_CallNoArgs(parts.autocast.get()));
    if (cast.get() != Py_False) {
        PyErr_Clear();
        return false;
    }
    for (const ProgramParts::Laid& laid : parts.laid) {
        PyObject* value = values[laid.argument];
        Owned dimensions(PyObject_GetAttr(value, ndim)), dtype(PyObject_GetAttr(value, dtype_name)),
            contiguous(PyObject_CallMethodNoArgs(value, is_contiguous));
        if (!dimensions || !dtype || !contiguous ||
            PyLong_AsLong(dimensions.get()) != laid.dimensions ||
            dtype.get() != laid.dtype.get() ||
            (contiguous.get() == Py_True) != laid.contiguous) {
            PyErr_Clear();
            return false;
        }
    }
    return true;
}

// Hooks the nodes where the gradients of inputs meet: 1, or 0 if these are not where they were, or
// -1 with an exception.
int hook_meetings(const ProgramParts& parts, const Call& call, PyObject* returned,
                  uint64_t start) {
    if (next_sequence_number() - start != uint64_t(parts.made)) return 0;
    std::vector<Owned> nodes;
    for (const Hooking& meeting : parts.meetings) {
        nodes.push_back(meeting.route.follow(returned, start));
        if (!nodes.back()) return PyErr_Occurred() ? -1 : 0;
    }
    PyObject* values[MOST_OPERANDS];
    flatten(call.operands(), values);
    for (size_t i = 0; i < nodes.size(); ++i) {
        const std::vector<int>& arguments = parts.shaped[i];
        Owned shapes(PyTuple_New(Py_ssize_t(arguments.size())));
        if (!shapes) return -1;
        for (size_t k = 0; k < arguments.size(); ++k) {
            PyObject* shape = PyObject_GetAttr(values[arguments[k]], shape_name);
            if (shape == nullptr) return -1;
            PyTuple_SET_ITEM(shapes.get(), Py_ssize_t(k), shape);
        }
        Owned hook = parts.meetings[i].make(shapes.get());
        if (!hook || !hook_node(nodes[i].get(), hook.get(), Seen::GIVEN)) return -1;
    }
    return 1;
}

// Whether `value` is what a call was made with.
bool is_operand(const Operands& operands, PyObject* value) {
    PyObject* values[MOST_OPERANDS];
    size_t count = flatten(operands, values);
    return std::find(values, values + count, value) != values + count;
}

// Hooks the gradient that will arrive at what the op returned. False with an exception.
bool hook_arrivals(const ProgramParts& parts, const Call& call, PyObject* returned) {
    if (parts.arrivals.empty()) return true;
    Owned required(PyObject_GetAttr(returned, requires_grad));
    if (!required) return false;
    // An op that returns its own input has made no node.
    if (required.get() != Py_True || is_operand(call.operands(), returned)) return true;
    for (const Hooking& arrival : parts.arrivals) {
        if (!hook_tensor(returned, arrival.hook.get())) return false;
    }
    return true;
}

}  // namespace

bool fits(const Program* program, const Watch* watch, PyObject* record, const Call& call,
          bool gradients) {
    const ProgramParts& parts = *program->parts;
    const Operands& operands = call.operands();
    if (parts.epoch.get() != watch->epoch) return false;
    if (gradients) {
        bool tracked = watch->wants_backward && parts.nodes < 0;
        bool hooks = !(parts.taps.empty() && parts.arrivals.empty() && parts.meetings.empty());
        if (!can_set_gradients() || !parts.with_gradients ||
            (tracked && !may_hook(watch, record)) ||
            (!parts.taps.empty() && !call.takes_others())) {
            return false;
        }
        // The user's own modes are not to hear of hooks.
        if ((tracked || hooks) && watch->identity->in_function_modes()) return false;
    }
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
        if (!parts.meetings.empty() && !laid_the_same(parts, values)) return false;
    }
    return !stood_in(watch);
}

PyObject* run_program(Program* program, PyObject* record, Thread* thread, Watch* watch,
                      Definition* definition, Call& call, bool gradients) {
    Owned kept = Owned::share(reinterpret_cast<PyObject*>(program));
    ProgramParts* parts = program->parts;
    Release release(parts, watch);
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
        Owned result = call_step(parts->before[i], inputs.get(), thread, watch, gradients);
        if (!result) return nullptr;
        if (result.get() != Py_None) {
            return go_on(record, watch, definition, call, results(i, result.get()), results(0, nullptr),
                         nullptr, 0);
        }
    }
    uint64_t start = gradients ? next_sequence_number() : 0;
    Owned returned = gradients && !parts->taps.empty() ? call_tapped(*parts, watch, call)
                                                       : Owned(call.original());
    if (!returned || returned.get() == Py_NotImplemented) return returned.release();
    PyObject* unhooked = nullptr;  // the record, if nodes of this execution need hooks
    if (gradients) {
        bool tensor =
            reinterpret_cast<PyObject*>(Py_TYPE(returned.get())) == watch->identity->tensor;
        // What needs more, Python does: all of it, or all but the gradients of inputs.
        int met = parts->meetings.empty() ? 1
                  : tensor                ? hook_meetings(*parts, call, returned.get(), start)
                                          : 0;
        if (met < 0) return nullptr;
        if (watch->wants_backward && next_sequence_number() - start != uint64_t(parts->nodes)) {
            unhooked = record;
        }
        if (met == 0 || !(tensor || (parts->arrivals.empty() && unhooked == nullptr))) {
            return go_on(record, watch, definition, call, results(parts->before.size(), nullptr),
                         results(0, nullptr), returned.get(), start, met == 1);
        }
    }
    auto finish = [&]() -> PyObject* {
        if (unhooked != nullptr) {
            int hooked = hook_record(watch, unhooked, returned.get(), start);
            if (hooked < 0) return nullptr;
            if (hooked == 0) {
                return go_on(record, watch, definition, call,
                             results(parts->before.size(), nullptr),
                             results(parts->after.size(), nullptr), returned.get(), start);
            }
        }
        if (gradients && !hook_arrivals(*parts, call, returned.get())) return nullptr;
        return returned.release();
    };
    if (parts->after.empty()) return finish();
    Owned outputs;
    if (PyTuple_Check(returned.get()) || PyList_Check(returned.get())) {
        outputs = Owned(PySequence_List(returned.get()));
    } else if ((outputs = Owned(PyList_New(1)))) {
        PyList_SET_ITEM(outputs.get(), 0, Py_NewRef(returned.get()));
    }
    if (!outputs || !lend(parts, outputs_name, outputs.get())) return nullptr;
    for (size_t i = 0; i < parts->after.size(); ++i) {
        if (!parts->after[i].reaches(outputs.get())) {
            return go_on(record, watch, definition, call, results(parts->before.size(), nullptr),
                         results(i, nullptr), returned.get(), start);
        }
        Owned result = call_step(parts->after[i], outputs.get(), thread, watch, gradients);
        if (!result) return nullptr;
        if (result.get() != Py_None) {
            return go_on(record, watch, definition, call, results(parts->before.size(), nullptr),
                         results(i, result.get()), returned.get(), start);
        }
    }
    return finish();
}

void name_strings() {
    released = PyUnicode_InternFromString("_released");
    inputs_name = PyUnicode_InternFromString("inputs");
    outputs_name = PyUnicode_InternFromString("outputs");
    constant_name = PyUnicode_InternFromString("_constant");
    requires_grad = PyUnicode_InternFromString("requires_grad");
    ndim = PyUnicode_InternFromString("ndim");
    dtype_name = PyUnicode_InternFromString("dtype");
    is_contiguous = PyUnicode_InternFromString("is_contiguous");
    shape_name = PyUnicode_InternFromString("shape");
}

}  // namespace amanda
