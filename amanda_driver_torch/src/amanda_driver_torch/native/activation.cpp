// Activations: calls of modules as objects that `STATE.activations` lists.
#include "identity.h"

#include <structmember.h>

namespace amanda {

namespace {

PyTypeObject* activation_type = nullptr;

PyObject* activation_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"scope", nullptr};
    PyObject* scope;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", const_cast<char**>(names), &scope)) {
        return nullptr;
    }
    auto* self = reinterpret_cast<Activation*>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->scope = Py_NewRef(scope);
    self->progress = new Progress;
    return reinterpret_cast<PyObject*>(self);
}

void activation_dealloc(PyObject* object) {
    auto* self = reinterpret_cast<Activation*>(object);
    Progress* progress = self->progress;
    if (!progress->in_step && progress->expected && progress->info) {
        progress->info->last = progress->expected;  // What the next one will expect.
    }
    delete progress;
    Py_CLEAR(self->scope);
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyObject* activation_copy(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<Activation*>(object);
    auto* copy = new_activation(self->scope, nullptr, nullptr);
    if (copy == nullptr) return nullptr;
    *copy->progress = *self->progress;
    // Another extent: the frame that bounds this one may be gone then.
    copy->progress->bound = nullptr;
    if (!copy->progress->in_step && copy->progress->expected) {
        auto* passed = new Sequence;
        passed->entries = self->progress->expected->entries;
        copy->progress->expected = Shared<Sequence>(passed);
    }
    return reinterpret_cast<PyObject*>(copy);
}

PyMethodDef activation_methods[] = {
    {"copy", activation_copy, METH_NOARGS,
     "copy($self, /)\n--\n\nThe activation as it stands, to be resumed by a recomputation."},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef activation_members[] = {
    {"scope", T_OBJECT, offsetof(Activation, scope), READONLY, "The scope."},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot activation_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(activation_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(activation_dealloc)},
    {Py_tp_methods, activation_methods},
    {Py_tp_members, activation_members},
    {Py_tp_doc, const_cast<char*>("One call of a module: its scope, and what was passed in it.")},
    {0, nullptr},
};
PyType_Spec activation_spec = {"amanda_driver_torch._native.Activation", sizeof(Activation), 0,
                               Py_TPFLAGS_DEFAULT, activation_slots};

}  // namespace

Activation* new_activation(PyObject* scope, ScopeInfo* info, const void* bound) {
    auto* self = reinterpret_cast<Activation*>(activation_type->tp_alloc(activation_type, 0));
    if (self == nullptr) return nullptr;
    self->scope = Py_NewRef(scope);
    self->progress = new Progress;
    self->progress->bound = bound;
    if (info != nullptr) {
        self->progress->info = Shared<ScopeInfo>(info);
        self->progress->expected = info->last;
    }
    return self;
}

bool is_activation(PyObject* object) { return Py_TYPE(object) == activation_type; }

int add_activation(PyObject* module) {
    activation_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&activation_spec));
    if (activation_type == nullptr) return -1;
    return PyModule_AddObjectRef(module, "Activation", reinterpret_cast<PyObject*>(activation_type));
}

}  // namespace amanda
