// Activations: calls of modules, which `STATE.activations` lists.
#include "identity/identity.h"

#include <new>

namespace amanda {

namespace {

PyTypeObject* activation_type = nullptr;

// Modules are called every few microseconds, so activations are reused.
constexpr size_t SPARE = 64;
Activation* spare[SPARE];
size_t spares = 0;

PyObject* activation_new(PyTypeObject*, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"scope", "around", "frame", nullptr};
    PyObject *scope, *around = Py_None, *frame = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO", const_cast<char**>(names), &scope,
                                     &around, &frame)) {
        return nullptr;
    }
    // Call sites in a zone end where those of the call around it do.
    const void* bound = is_activation(around)
                            ? reinterpret_cast<Activation*>(around)->progress.bound
                            : nullptr;
    if (!PyFrame_Check(frame)) frame = nullptr;
    return reinterpret_cast<PyObject*>(new_activation(scope, nullptr, bound, frame));
}

HOT void activation_dealloc(PyObject* object) {
    auto* self = reinterpret_cast<Activation*>(object);
    Progress& progress = self->progress;
    if (!progress.in_step && progress.expected && progress.info && !progress.info->suspended) {
        progress.info->expect(progress.expected);  // for the next activation
    }
    progress.~Progress();
    Py_CLEAR(self->own_scope);
    if (spares < SPARE) {
        spare[spares++] = self;
        return;
    }
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyObject* activation_copy(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<Activation*>(object);
    auto* copy = new_activation(self->scope(), nullptr, nullptr);
    if (copy == nullptr) return nullptr;
    copy->progress = self->progress;
    // For another context, in which the frame that bounds this one may be gone.
    copy->progress.bound = nullptr;
    copy->progress.module = nullptr;
    if (copy->progress.frame) {
        copy->progress = Progress();
        return reinterpret_cast<PyObject*>(copy);
    }
    if (!copy->progress.in_step && copy->progress.expected) {
        auto* passed = new Sequence;
        passed->steps = self->progress.expected->steps;
        copy->progress.expected = Shared<Sequence>(passed);
    }
    return reinterpret_cast<PyObject*>(copy);
}

PyMethodDef activation_methods[] = {
    {"copy", activation_copy, METH_NOARGS,
     "copy($self, /)\n--\n\nThe activation as it stands, to be resumed by a recomputation."},
    {nullptr, nullptr, 0, nullptr},
};
PyObject* activation_scope(PyObject* object, void*) {
    return Py_NewRef(reinterpret_cast<Activation*>(object)->scope());
}

PyGetSetDef activation_fields[] = {
    {"scope", activation_scope, nullptr, "The scope.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot activation_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(activation_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(activation_dealloc)},
    {Py_tp_methods, activation_methods},
    {Py_tp_getset, activation_fields},
    {Py_tp_doc, const_cast<char*>("One call of a module: its scope and the ops called in it.")},
    {0, nullptr},
};
PyType_Spec activation_spec = {"amanda_driver_torch._native.Activation", sizeof(Activation), 0,
                               Py_TPFLAGS_DEFAULT, activation_slots};

}  // namespace

HOT Activation* new_activation(PyObject* scope, ScopeInfo* info, const void* bound,
                               PyObject* frame) {
    Activation* self;
    if (spares != 0) {
        self = spare[--spares];
        Py_SET_REFCNT(self, 1);
    } else {
        self = reinterpret_cast<Activation*>(activation_type->tp_alloc(activation_type, 0));
        if (self == nullptr) return nullptr;
    }
    self->own_scope = info == nullptr ? Py_NewRef(scope) : nullptr;
    new (&self->progress) Progress;
    self->progress.bound = bound;
    if (frame != nullptr) self->progress.frame = Owned::share(frame);
    if (info != nullptr) {
        self->progress.info = Shared<ScopeInfo>(info);
        self->progress.begin();
        if (self->progress.steps != nullptr) __builtin_prefetch(self->progress.steps);
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
