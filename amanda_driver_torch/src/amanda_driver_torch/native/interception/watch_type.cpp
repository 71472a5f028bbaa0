// Watches as Python objects: creation and destruction.
#include "interception/watch_type.h"

#include <structmember.h>

#include "identity/identity.h"
#include "interception/compiled.h"
#include "kept_result.h"
#include "programs/operator_call.h"
#include "record.h"
#include "thread.h"
#include "watch.h"

namespace amanda {

namespace {

// Drops what leads to the session.
void drop_fields(Watch* self) {
#define AMANDA_CLEAR_FIELD(name, kind) Py_CLEAR(self->name);
    AMANDA_WATCH_FIELDS(AMANDA_CLEAR_FIELD)
}

void close_switches(Watch* self) {
    if (self->switches == nullptr) return;
    self->switches = nullptr;
    PyBuffer_Release(&self->view);
}

int watch_clear(PyObject* object) {
    auto* self = reinterpret_cast<Watch*>(object);
    drop_fields(self);
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
#define AMANDA_VISIT_FIELD(name, kind) Py_VISIT(self->name);
    AMANDA_WATCH_FIELDS(AMANDA_VISIT_FIELD)
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

// Connects a watch to a session. False with an exception.
bool take_fields(Watch* self, PyObject* given) {
    WatchFields fields;
    if (!fields.read(given)) return false;
    Identity* identity = self->identity;
#define AMANDA_TAKE_FIELD(name, kind) self->name = fields.name.release();
    AMANDA_WATCH_FIELDS(AMANDA_TAKE_FIELD)
    identity->classify = fields.classify;
    identity->look_up = fields.look_up;
    identity->resolve = fields.resolve;
    identity->region = fields.region;
    identity->is_weight = fields.is_weight;
    // torch's types are never freed.
    identity->parameter = fields.parameter_type.get();
    identity->tensor = fields.tensor_type.get();
    find_tensor_attributes(identity->tensor);
    if (!find_slots(fields.record_type.get())) return false;
    Owned control(PyObject_GetAttrString(self->session, "control"));
    if (!control) return false;
    self->switches = amanda_open_switches(control.get(), &self->view);
    // No epoch is negative, so that the first operator reads the session.
    self->seen = -1;
    return self->switches != nullptr;
}

// Watch(fields).
PyObject* watch_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* given;
    if (!PyArg_ParseTuple(args, "O:Watch", &given)) return nullptr;
    Owned owner(type->tp_alloc(type, 0));
    if (!owner) return nullptr;
    auto* self = reinterpret_cast<Watch*>(owner.get());
    self->identity = new Identity;
    self->callbacks = new Callbacks;
    return take_fields(self, given) ? owner.release() : nullptr;
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
void disconnect(Watch* self) {
    drop_fields(self);
    close_switches(self);
    self->callbacks->clear();
    Identity* own = self->identity;
    own->classify = own->look_up = own->resolve = own->region = own->is_weight = Owned();
}

PyObject* watch_close(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<Watch*>(object);
    disconnect(self);
    self->identity->forget();
    Py_RETURN_NONE;
}

PyObject* watch_suspend(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<Watch*>(object);
    disconnect(self);
    Owned kept(PyList_New(0));
    return kept && self->identity->set_aside(kept.get()) ? kept.release() : nullptr;
}

PyObject* watch_resume(PyObject* object, PyObject* args) {
    auto* self = reinterpret_cast<Watch*>(object);
    PyObject *given, *kept;
    if (!PyArg_ParseTuple(args, "OO!", &given, &PyList_Type, &kept)) return nullptr;
    disconnect(self);
    if (!self->identity->take_back(kept)) self->identity->forget();
    if (!take_fields(self, given)) return nullptr;
    Py_RETURN_NONE;
}

PyMethodDef watch_methods[] = {
    {"close", watch_close, METH_NOARGS, "close($self, /)\n--\n\nLet go of the session."},
    {"forget", watch_forget, METH_NOARGS, "forget($self, /)\n--\n\nForget all records."},
    {"suspend", watch_suspend, METH_NOARGS,
     "suspend($self, /)\n--\n\n"
     "Let go of the session; return what `resume` needs, which may lead to it."},
    {"resume", watch_resume, METH_VARARGS,
     "resume($self, fields, kept, /)\n--\n\nServe another session with the same records."},
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
    {"edits", T_LONGLONG, offsetof(Watch, edits), READONLY,
     "Number of values edited so far without Python."},
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

int add_watch(PyObject* module) {
    watch_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&watch_spec));
    if (watch_type == nullptr) return -1;
    return PyModule_AddObjectRef(module, "Watch", reinterpret_cast<PyObject*>(watch_type));
}

}  // namespace amanda
