// The execution of one operator.
#include "interception/operate.h"

#include "gradients/nodes.h"
#include "identity/expect.h"
#include "programs/program.h"
#include "record.h"
#include "thread.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

// Returns true for a plain tensor that is no view.
bool is_no_view(const Watch* watch, PyObject* value) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != watch->identity->tensor) return false;
    Owned base(PyObject_GetAttrString(value, kBase));
    if (!base) PyErr_Clear();
    return base.get() == Py_None;
}

// For an idle op that made other nodes than before, or whose nodes are not known yet.
PyObject* settle(Watch* watch, PyObject* record, Definition* definition, Call& call,
                 PyObject* result, uint64_t start) {
    if (watch->settle == nullptr) return result;  // `apply` ended inside the operator.
    // `x[i] = v` returns nothing; it has made the node of `x`, unless that is a view.
    Operands operands = call.operands();
    PyObject* first = operands.first != nullptr ? operands.first
                      : operands.count > 0      ? operands.items[0]
                                                : nullptr;
    bool wrote = result == Py_None && first != nullptr && is_no_view(watch, first);
    // The user's modes must not see the hooks.
    int hooked =
        in_function_modes() ? 0 : hook_record(watch, record, wrote ? first : result, start);
    if (hooked != 0) {
        if (hooked < 0) Py_CLEAR(result);
        return result;
    }
    Owned returned(result), begin(PyLong_FromUnsignedLongLong(start)), args(call.args()),
        kwargs(call.kwargs()), function = Owned::share(way_of(watch->settle));
    PyObject* operator_ = definition->get_operator();
    if (operator_ == nullptr) {
        return is_skipped(watch, definition->type.name) ? Py_NewRef(result) : nullptr;
    }
    if (!begin || !args || !kwargs) return nullptr;
    return PyObject_CallFunctionObjArgs(function.get(), record, operator_, args.get(),
                                        kwargs.get(), result, begin.get(), nullptr);
}

long long nodes_of(PyObject* record) {
    PyObject* nodes = slot(record, idle_nodes_at);
    return nodes != nullptr ? PyLong_AsLongLong(nodes) : -1;
}

// Handles all ops except idle ones that follow the same op as last time.
__attribute__((noinline)) PyObject* operate_slowly(Thread* thread, Watch* watch, Step* step,
                                                   Definition* definition, Call& call) {
    Owned watch_kept = Owned::share(reinterpret_cast<PyObject*>(watch));
    Inside inside(thread);
    bool look_away = false;
    Entry* entry = step != nullptr ? step->entry.get()
                                   : watch->identity->locate(thread, definition->type,
                                                             call.operands(), &look_away, &step);
    if (look_away) return call.original();
    if (entry == nullptr) {
        return is_skipped(watch, definition->type.name) ? call.original() : nullptr;
    }
    bool caching = watch->switches != nullptr && watch->switches->caching != 0;
    PyObject* record = entry->record.get();
    Owned kept = Owned::share(record);
    if (slot(record, idle_epoch_at) == watch->epoch && caching) {
        long long nodes = nodes_of(record);
        if (step != nullptr) {
            step->idle_epoch = watch->epoch;
            step->idle_nodes = nodes;
        }
        if (!watch->wants_backward || !gradients_enabled()) return call.original();
        uint64_t start = next_sequence_number();
        PyObject* result = call.original();
        if (result == nullptr || (long long)(next_sequence_number() - start) == nodes) return result;
        return settle(watch, record, definition, call, result, start);
    }
    PyObject* program = slot(record, program_at);
    if (is_program(program) && caching && !thread->recomputing) {
        bool gradients = gradients_enabled();
        auto* own = reinterpret_cast<Program*>(program);
        if (fits(own, watch, record, call, gradients)) {
            return run_program(own, record, thread, watch, definition, call, gradients);
        }
    }
    PyObject* operator_ = definition->get_operator();
    Owned args(call.args()), kwargs(call.kwargs()), execute = Owned::share(way_of(watch->execute));
    if (operator_ == nullptr) {
        return is_skipped(watch, definition->type.name) ? call.original() : nullptr;
    }
    if (!args || !kwargs) return nullptr;
    thread->refused = false;
    PyObject* arguments[] = {record, operator_, definition->call, args.get(), kwargs.get()};
    PyObject* result = PyObject_Vectorcall(execute.get(), arguments, 5, nullptr);
    if (result == nullptr && thread->refused && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        result = Py_NewRef(Py_NotImplemented);
    }
    thread->refused = false;
    return result;
}

__attribute__((noinline)) PyObject* settle_step(const Shared<Sequence>& sequence, Step* step,
                                                Thread* thread, Definition* definition, Call& call,
                                                PyObject* result, uint64_t start) {
    Shared<Sequence> kept = sequence;
    Watch* watch = thread->watch;
    if (watch == nullptr) return result;
    Owned record = Owned::share(step->entry->record.get()),
          watch_kept = Owned::share(reinterpret_cast<PyObject*>(watch));
    Inside inside(thread);
    result = settle(watch, record.get(), definition, call, result, start);
    step->idle_nodes = nodes_of(record.get());
    return result;
}

}  // namespace

HOT PyObject* operate(Thread* thread, Definition* definition, Call& call) {
    Watch* watch = thread->watch;
    if (!watch->enabled(thread)) return call.original();
    // An op that is idle stays so for the whole epoch.
    if (!watch->refresh()) return nullptr;
    Step* step = expect(*watch->identity, thread, definition->type, call.operands());
    if (step == nullptr || step->idle_epoch != watch->epoch || watch->switches->caching == 0) {
        return operate_slowly(thread, watch, step, definition, call);
    }
    PyObject* result;
    if (!watch->wants_backward || !gradients_enabled()) {
        ++thread->depth;
        result = call.original();
        --thread->depth;
        return result;
    }
    // The step is owned by the sequence.
    Shared<Sequence> sequence = sequence_of(thread->activations);
    uint64_t start = next_sequence_number();
    ++thread->depth;
    result = call.original();
    --thread->depth;
    if (result == nullptr || (long long)(next_sequence_number() - start) == step->idle_nodes) {
        return result;
    }
    return settle_step(sequence, step, thread, definition, call, result, start);
}

}  // namespace amanda
