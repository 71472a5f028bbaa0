// Hooks on gradients.
#include "gradients.h"

#include "thread.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

PyTypeObject* hook_type = nullptr;
PyObject *backward_hooks, *grad_fn, *register_hook, *register_hook_dict;

struct GradientHook {
    PyObject_HEAD
    PyObject* function;
    Shared<GradientSteps> steps;
};

// The watch under which the steps hold here and now, or null.
Watch* in_force(const GradientSteps& steps, const Thread* thread) {
    if (steps.program == nullptr || thread == nullptr || thread->watch == nullptr) return nullptr;
    Watch* watch = thread->watch;
    if (reinterpret_cast<PyObject*>(watch) != steps.watch.get() || !watch->enabled(thread) ||
        *watch->now != steps.epoch.get() || *watch->is_caching != Py_True || gradients_enabled()) {
        return nullptr;
    }
    return watch;
}

PyObject* hand_over(GradientHook* hook, PyObject* grad, const Owned& done) {
    if (!done) return nullptr;
    return PyObject_CallFunctionObjArgs(hook->function, grad, done.get(), nullptr);
}

PyObject* hook_call(PyObject* self, PyObject* args, PyObject* kwargs) {
    auto* hook = reinterpret_cast<GradientHook*>(self);
    if (PyTuple_GET_SIZE(args) != 1 || kwargs != nullptr) {
        PyErr_SetString(PyExc_TypeError, "a hook takes a gradient");
        return nullptr;
    }
    PyObject* grad = PyTuple_GET_ITEM(args, 0);
    Shared<GradientSteps> steps = hook->steps;
    Thread* thread = current;
    Watch* watch = in_force(*steps.get(), thread);
    if (watch == nullptr || grad == Py_None) return hand_over(hook, grad, results(0, nullptr));
    Owned kept = Owned::share(self), program = Owned::share(steps->program),
          values(PyList_New(1));
    if (!values) return nullptr;
    PyList_SET_ITEM(values.get(), 0, Py_NewRef(grad));
    for (size_t i = 0; i < steps->steps.size(); ++i) {
        Owned result = call_step(steps->steps[i], values.get(), thread, watch, false);
        if (!result) return nullptr;
        if (result.get() != Py_None || in_force(*steps.get(), thread) != watch) {
            return hand_over(hook, grad, results(i, result.get()));
        }
    }
    Py_RETURN_NONE;
}

void hook_dealloc(PyObject* self) {
    auto* hook = reinterpret_cast<GradientHook*>(self);
    PyTypeObject* type = Py_TYPE(self);
    Py_CLEAR(hook->function);
    hook->steps.~Shared();
    type->tp_free(self);
    Py_DECREF(type);
}

Owned make_hook(PyObject* function, const Shared<GradientSteps>& steps) {
    Owned made(hook_type->tp_alloc(hook_type, 0));
    if (!made) return made;
    auto* hook = reinterpret_cast<GradientHook*>(made.get());
    hook->function = Py_NewRef(function);
    new (&hook->steps) Shared<GradientSteps>(steps);
    return made;
}

PyType_Slot hook_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(hook_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(hook_call)},
    {Py_tp_doc, const_cast<char*>("Routines for the gradient that arrives at a tensor.")},
    {0, nullptr},
};
PyType_Spec hook_spec = {"amanda_driver_torch._native.GradientHook", sizeof(GradientHook), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, hook_slots};

}  // namespace

void GradientSteps::forget() {
    program = nullptr;
    std::vector<ProgramStep> dropped;
    steps.swap(dropped);
    watch = epoch = Owned();
}

bool read_arrival(PyObject* parts, PyObject* program, PyObject* epoch, PyObject* watch,
                  Arrival* arrival) {
    PyObject *function, *steps;
    if (!PyArg_ParseTuple(parts, "OO!", &function, &PyList_Type, &steps)) return false;
    arrival->steps = Shared<GradientSteps>(new GradientSteps);
    GradientSteps* made = arrival->steps.get();
    if (!read_steps(steps, &made->steps)) return false;
    made->program = program;
    made->epoch = Owned::share(epoch);
    made->watch = Owned::share(watch);
    arrival->hook = make_hook(function, arrival->steps);
    return bool(arrival->hook);
}

bool hook_tensor(PyObject* tensor, PyObject* hook) {
    Owned hooks(PyObject_GetAttr(tensor, backward_hooks));
    if (!hooks) return false;
    if (hooks.get() != Py_None) {
        return bool(Owned(PyObject_CallMethodOneArg(tensor, register_hook, hook)));
    }
    // What `Tensor.register_hook` does, without an object for a handle that nobody keeps.
    hooks = Owned(PyODict_New());
    if (!hooks || PyODict_SetItem(hooks.get(), hook, hook) < 0 ||
        PyObject_SetAttr(tensor, backward_hooks, hooks.get()) < 0) {
        return false;
    }
    Owned node(PyObject_GetAttr(tensor, grad_fn));
    if (!node || node.get() == Py_None) return bool(node);
    return bool(Owned(PyObject_CallMethodOneArg(node.get(), register_hook_dict, tensor)));
}

int add_gradients(PyObject* module) {
    backward_hooks = PyUnicode_InternFromString("_backward_hooks");
    grad_fn = PyUnicode_InternFromString("grad_fn");
    register_hook = PyUnicode_InternFromString("register_hook");
    register_hook_dict = PyUnicode_InternFromString("_register_hook_dict");
    hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&hook_spec));
    if (hook_type == nullptr) return -1;
    return PyModule_AddObjectRef(module, "GradientHook", reinterpret_cast<PyObject*>(hook_type));
}

}  // namespace amanda
