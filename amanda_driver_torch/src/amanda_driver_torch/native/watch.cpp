// The execution of one operator, and the creation of watches.
#include "watch.h"

#include <structmember.h>

#include "compiled.h"
#include "expect.h"
#include "nodes.h"
#include "program.h"
#include "redirect.h"
#include "thread.h"
#include "torch_symbols.h"

namespace amanda {


namespace {

PyTypeObject* watch_type = nullptr;
PyObject* watch_name = nullptr;

// Offsets of slots of the driver's records, which are read without an attribute lookup.
Py_ssize_t idle_epoch_at, idle_nodes_at, program_at, hooks_at;

PyObject* slot(PyObject* object, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// Returns the offset of an entry of `__slots__`; -1 with an exception.
Py_ssize_t slot_offset(PyObject* type, const char* name) {
    Owned descriptor(PyObject_GetAttrString(type, name));
    if (!descriptor) return -1;
    if (!Py_IS_TYPE(descriptor.get(), &PyMemberDescr_Type)) {
        PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
        return -1;
    }
    return reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
}

}  // namespace

PyObject* Call::args() const {
    Operands given = operands();
    Py_ssize_t shift = given.first != nullptr;
    PyObject* args = PyTuple_New(given.count + shift);
    if (args == nullptr) return nullptr;
    if (shift) PyTuple_SET_ITEM(args, 0, Py_NewRef(given.first));
    for (Py_ssize_t i = 0; i < given.count; ++i) {
        PyTuple_SET_ITEM(args, i + shift, Py_NewRef(given.items[i]));
    }
    return args;
}

PyObject* Call::kwargs() const {
    return operands().keywords();
}

bool Watch::read_session() {
    Owned backward(PyObject_GetAttrString(session, "wants_backward"));
    Owned scopes(PyObject_GetAttrString(session, "watches_scopes"));
    Owned calls(PyObject_GetAttrString(session, "watches_calls"));
    if (!backward || !scopes || !calls) return false;
    wants_backward = PyObject_IsTrue(backward.get()) == 1;
    watches_scopes = PyObject_IsTrue(scopes.get()) == 1;
    watches_calls = PyObject_IsTrue(calls.get()) == 1;
    PyObject* now = PyObject_GetAttrString(session, "epoch");
    if (now == nullptr) return false;
    Py_XSETREF(epoch, now);
    seen = switches->epoch;
    return true;
}

int hook_record(Watch* watch, PyObject* record, PyObject* returned, uint64_t start) {
    PyObject* hooks = slot(record, hooks_at);
    if (!serves(hooks, watch, next_sequence_number() - start)) return 0;
    auto is_plain = [&](PyObject* value) {
        return reinterpret_cast<PyObject*>(Py_TYPE(value)) == watch->identity->tensor;
    };
    if (PyTuple_Check(returned) || PyList_Check(returned)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(returned); ++i) {
            if (!is_plain(PySequence_Fast_GET_ITEM(returned, i))) return 0;
        }
    } else if (!is_plain(returned)) {
        return 0;
    }
    return hook_nodes(hooks, returned, start);
}

bool may_hook(const Watch* watch, PyObject* record) {
    return may_serve(slot(record, hooks_at), watch);
}

bool hooks_later(const Watch* watch, PyObject* record) {
    return !may_hook(watch, record) || !hooks_at_once(slot(record, hooks_at));
}

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

}  // namespace

bool is_skipped(Watch* watch, PyObject* where) {
    if (watch->failed == nullptr || !PyErr_ExceptionMatches(PyExc_Exception)) return false;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != nullptr) PyException_SetTraceback(value, trace);
    Owned own_type(type), error(value), own_trace(trace), function = Owned::share(watch->failed);
    Owned answer(PyObject_CallFunctionObjArgs(function.get(), error.get(), where, nullptr));
    return bool(answer);
}

namespace {

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
    bool caching = watch->switches->caching != 0;
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

namespace {

// The type.

constexpr int WATCH_FIELDS = 18;

constexpr const char* FIELDS[] = {
    "get_control",   "execute", "settle",  "call_module", "enter_module",
    "module_failed", "resume",  "edit",    "annotate",    "scopes",
    "raise_pending", "pending", "session", "tap",         "weakly",
    "weak_value",    "failed",  "memoized"};

PyObject** field(Watch* self, int i) {
    PyObject** fields[] = {
        &self->get_control,   &self->execute, &self->settle,  &self->call_module, &self->enter_module,
        &self->module_failed, &self->resume,  &self->edit,    &self->annotate,    &self->scopes,
        &self->raise_pending, &self->pending, &self->session, &self->tap,         &self->weakly,
        &self->weak_value,    &self->failed,  &self->memoized};
    return fields[i];
}

void close_switches(Watch* self) {
    if (self->switches == nullptr) return;
    self->switches = nullptr;
    PyBuffer_Release(&self->view);
}

int watch_clear(PyObject* object) {
    auto* self = reinterpret_cast<Watch*>(object);
    for (int i = 0; i < WATCH_FIELDS; ++i) Py_CLEAR(*field(self, i));
    close_switches(self);
    Py_CLEAR(self->epoch);
    delete self->identity;
    self->identity = nullptr;
    delete self->callbacks;
    self->callbacks = nullptr;
    return 0;
}

int watch_traverse(PyObject* object, visitproc visit, void* arg) {
    auto* self = reinterpret_cast<Watch*>(object);
    for (int i = 0; i < WATCH_FIELDS; ++i) Py_VISIT(*field(self, i));
    Py_VISIT(Py_TYPE(object));
    return 0;
}

void watch_dealloc(PyObject* object) {
    PyObject_GC_UnTrack(object);
    watch_clear(object);
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyObject* watch_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    if (PyTuple_GET_SIZE(args) != 0 || kwargs == nullptr) {
        PyErr_SetString(PyExc_TypeError, "Watch takes keyword arguments");
        return nullptr;
    }
    Owned owner(type->tp_alloc(type, 0));
    if (!owner) return nullptr;
    auto* self = reinterpret_cast<Watch*>(owner.get());
    auto* identity = self->identity = new Identity;
    self->callbacks = new Callbacks;
    auto take = [kwargs](const char* name) {
        PyObject* value = PyDict_GetItemString(kwargs, name);
        if (value == nullptr) PyErr_Format(PyExc_TypeError, "Watch needs %s", name);
        return Owned::share(value);
    };
    for (int i = 0; i < WATCH_FIELDS; ++i) {
        if ((*field(self, i) = take(FIELDS[i]).release()) == nullptr) return nullptr;
    }
    identity->classify = take("classify");
    identity->look_up = take("look_up");
    identity->resolve = take("resolve");
    identity->region = take("region");
    identity->is_weight = take("is_weight");
    Owned record = take("record_type"), parameter = take("parameter_type"),
          tensor = take("tensor_type");
    if (!identity->classify || !identity->look_up || !identity->resolve || !identity->region ||
        !identity->is_weight ||
        !record || !parameter || !tensor) {
        return nullptr;
    }
    // torch's types are never freed.
    identity->parameter = parameter.get();
    identity->tensor = tensor.get();
    if (find_tensor_attributes(tensor.get()) < 0) return nullptr;
    if ((idle_epoch_at = slot_offset(record.get(), "idle_epoch")) < 0 ||
        (program_at = slot_offset(record.get(), "program")) < 0 ||
        (hooks_at = slot_offset(record.get(), "hooks")) < 0 ||
        (idle_nodes_at = slot_offset(record.get(), "idle_nodes")) < 0) {
        return nullptr;
    }
    Owned control(PyObject_GetAttrString(self->session, "control"));
    if (!control) return nullptr;
    self->switches = amanda_open_switches(control.get(), &self->view);
    // No epoch is negative, so that the first operator reads the session.
    self->seen = -1;
    return self->switches != nullptr ? owner.release() : nullptr;
}

PyObject* watch_forget(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<Watch*>(object);
    if (self->identity != nullptr) self->identity->forget();
    Py_RETURN_NONE;
}

PyObject* watch_locate(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    auto* self = reinterpret_cast<Watch*>(object);
    Thread* thread = current;
    if (count != 3 || !PyTuple_Check(args[1]) || !PyDict_Check(args[2]) || thread == nullptr) {
        PyErr_SetString(PyExc_TypeError, "locate(op_type, args, kwargs), in a watched thread");
        return nullptr;
    }
    OpType type;
    if (!intern_type(args[0], &type)) return nullptr;
    Operands operands{nullptr, &PyTuple_GET_ITEM(args[1], 0), PyTuple_GET_SIZE(args[1]), args[2]};
    bool look_away = false;
    Step* step = nullptr;
    Entry* entry = self->identity->locate(thread, type, operands, &look_away, &step);
    if (entry != nullptr) return Py_NewRef(entry->record.get());
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

PyObject* watch_keep_callback(PyObject* object, PyObject* args) {
    auto* self = reinterpret_cast<Watch*>(object);
    PyObject *callback, *chosen, *region;
    if (!PyArg_ParseTuple(args, "OOO", &callback, &chosen, &region)) return nullptr;
    if (self->switches != nullptr &&
        !self->callbacks->keep(callback, chosen, region, self->switches->epoch)) {
        return nullptr;
    }
    Py_RETURN_NONE;
}

// After the session ends, running calls continue with the originals.
PyObject* watch_close(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<Watch*>(object);
    for (int i = 0; i < WATCH_FIELDS; ++i) Py_CLEAR(*field(self, i));
    close_switches(self);
    self->identity->forget();
    self->callbacks->clear();
    Identity* own = self->identity;
    own->classify = own->look_up = own->resolve = own->region = own->is_weight = Owned();
    Py_RETURN_NONE;
}

PyMethodDef watch_methods[] = {
    {"close", watch_close, METH_NOARGS, "close($self, /)\n--\n\nLet go of the session."},
    {"forget", watch_forget, METH_NOARGS, "forget($self, /)\n--\n\nForget all records."},
    {"keep_callback", watch_keep_callback, METH_VARARGS,
     "keep_callback($self, callback, chosen, region, /)\n--\n\n"
     "Use `chosen` with a region of recompilations for this callback of Dynamo, in this epoch."},
    {"locate", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(watch_locate)),
     METH_FASTCALL,
     "locate($self, op_type, args, kwargs, /)\n--\n\n"
     "Return the record of the op that is being called; None to ignore the op."},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef watch_members[] = {
    {"second_order", T_BOOL, offsetof(Watch, second_order), 0,
     "Whether gradients of gradients are analysed."},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot watch_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(watch_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(watch_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(watch_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(watch_clear)},
    {Py_tp_methods, watch_methods},
    {Py_tp_members, watch_members},
    {Py_tp_doc, const_cast<char*>("Connects one session to the redirected functions.")},
    {0, nullptr},
};
PyType_Spec watch_spec = {"amanda_driver_torch._native.Watch", sizeof(Watch), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, watch_slots};

}  // namespace

int watch_of(PyObject* attachment, Watch** watch) {
    *watch = nullptr;
    Owned found(PyObject_GetAttr(attachment, watch_name));
    if (!found) return -1;
    if (Py_IS_TYPE(found.get(), watch_type)) *watch = reinterpret_cast<Watch*>(found.get());
    return 0;
}

int add_watch(PyObject* module) {
    watch_name = PyUnicode_InternFromString("watch");
    watch_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&watch_spec));
    if (watch_type == nullptr) return -1;
    return PyModule_AddObjectRef(module, "Watch", reinterpret_cast<PyObject*>(watch_type));
}

}  // namespace amanda
