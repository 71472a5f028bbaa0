// Hooks on gradients.
#include "gradients.h"

#include <algorithm>

#include "nodes.h"
#include "thread.h"
#include "torch_symbols.h"
#include "unwinding.h"
#include "watch.h"

namespace amanda {

namespace {

PyTypeObject* hook_type = nullptr;
PyObject *backward_hooks, *grad_fn, *register_hook, *register_prehook, *register_hook_dict;
PyObject *reshape, *transpose, *open_name, *op_name,
    *grad_outputs, *grad_inputs, *id_name, *next_id;

struct GradientHook {
    PyObject_HEAD
    PyObject *function, *own;  // own: see `Hooking::make`
    Shared<GradientSteps> steps;
};

// Returns the watch of this thread if the steps are valid under it now, else null.
Watch* in_force(const GradientSteps& steps, const Thread* thread) {
    if (steps.owner == nullptr || thread == nullptr || thread->watch == nullptr) return nullptr;
    Watch* watch = thread->watch;
    if (reinterpret_cast<PyObject*>(watch) != steps.watch.get() || !watch->enabled(thread) ||
        !watch->caches(steps.epoch.get()) || thread->recomputing || gradients_enabled()) {
        return nullptr;
    }
    return watch;
}

PyObject* hand_over(GradientHook* hook, PyObject* args, const Owned& done) {
    PyObject* stack[5];
    size_t count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
        stack[++count] = PyTuple_GET_ITEM(args, i);
    }
    if (hook->steps->seen == Seen::GIVEN) stack[++count] = hook->own;
    if (!done) return nullptr;
    stack[++count] = done.get();
    return PyObject_Vectorcall(hook->function, stack + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET,
                               nullptr);
}

// Fills the context of a backward op while its routines run.
class Open {
  public:
    explicit Open(const GradientSteps& steps)
        : execution_(steps.execution), op_(steps.op) {}
    ~Open() {
        if (!opened_) return;
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyDict_Clear(execution_.get());
        PyErr_Restore(type, value, trace);
    }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

    bool lend(PyObject* name, PyObject* list) {
        opened_ = true;
        return PyDict_SetItem(execution_.get(), open_name, Py_True) == 0 &&
               PyDict_SetItem(execution_.get(), op_name, op_.get()) == 0 &&
               PyDict_SetItem(execution_.get(), name, list) == 0;
    }

  private:
    Owned execution_, op_;
    bool opened_ = false;
};

// The most sizes that are passed one by one.
constexpr Py_ssize_t MOST_DIMENSIONS = 8;

// Returns a node's result as the gradient of an input of `shape`. The engine has given it the shape
// and the dtype of what it goes to.
Owned changed(PyObject* result, GradientSteps::Change change, PyObject* shape) {
    if (change == GradientSteps::Change::TRANSPOSE) {
        return Owned(PyObject_CallMethodNoArgs(result, transpose));
    }
    if (change == GradientSteps::Change::RESHAPE) {
        // Sizes one by one: PyTorch tries to read a tuple as a single size first, which takes long.
        PyObject* arguments[1 + MOST_DIMENSIONS] = {result};
        Py_ssize_t count = PyTuple_GET_SIZE(shape);
        if (count == 0 || count > MOST_DIMENSIONS) {
            return Owned(PyObject_CallMethodOneArg(result, reshape, shape));
        }
        for (Py_ssize_t i = 0; i < count; ++i) arguments[1 + i] = PyTuple_GET_ITEM(shape, i);
        return Owned(PyObject_VectorcallMethod(reshape, arguments, size_t(1 + count), nullptr));
    }
    return Owned::share(result);
}

// Returns a list that contains None only.
Owned nothing(Py_ssize_t count) {
    Owned values(PyList_New(count));
    for (Py_ssize_t i = 0; values && i < count; ++i) {
        PyList_SET_ITEM(values.get(), i, Py_NewRef(Py_None));
    }
    return values;
}

// Returns the gradients of inputs, made of a node's results.
Owned given(const GradientSteps& steps, PyObject* results, PyObject* shapes) {
    Owned values = nothing(steps.count);
    if (!values) return values;
    for (const auto& [position, length] : steps.lengths) {
        Owned list = nothing(length);
        if (!list) return list;
        PyList_SetItem(values.get(), position, list.release());
    }
    for (size_t i = 0; i < steps.ways.size(); ++i) {
        const GradientSteps::Way& way = steps.ways[i];
        if (!way.is_read) continue;
        if (way.index >= PyTuple_GET_SIZE(results)) {
            PyErr_SetString(PyExc_SystemError, "a node has fewer results than it had");
            return Owned();
        }
        PyObject* result = PyTuple_GET_ITEM(results, way.index);
        if (result == Py_None) continue;
        Owned value = changed(result, way.change, PyTuple_GET_ITEM(shapes, Py_ssize_t(i)));
        if (!value) return value;
        if (way.item < 0) {
            PyList_SetItem(values.get(), way.position, value.release());
        } else {
            PyList_SetItem(PyList_GET_ITEM(values.get(), way.position), way.item, value.release());
        }
    }
    return values;
}

// Returns the values for the routines of a hook called with `args`, as a list.
Owned seen_by(const GradientSteps& steps, PyObject* args, PyObject* shapes, Open* open) {
    PyObject* first = PyTuple_GET_ITEM(args, 0);
    if (steps.seen == Seen::ARRIVING || steps.seen == Seen::TOGETHER) {
        Owned values = nothing(steps.count);
        for (const GradientSteps::Way& way : steps.ways) {
            PyObject* gradient = first;
            if (steps.seen == Seen::TOGETHER) {
                if (way.index >= PyTuple_GET_SIZE(first)) {
                    PyErr_SetString(PyExc_SystemError, "a node has fewer gradients than it had");
                    return Owned();
                }
                gradient = PyTuple_GET_ITEM(first, way.index);
            }
            if (values) PyList_SetItem(values.get(), way.position, Py_NewRef(gradient));
        }
        return values;
    }
    if (steps.seen == Seen::GIVEN) return given(steps, first, shapes);
    Owned values(PySequence_List(first));
    if (!values) return values;
    if (steps.seen == Seen::BEFORE) {
        return open->lend(grad_outputs, values.get()) ? values : Owned();
    }
    Owned before(PySequence_List(PyTuple_GET_ITEM(args, 1)));
    return before && open->lend(grad_outputs, before.get()) &&
                   open->lend(grad_inputs, values.get())
               ? values
               : Owned();
}

PyObject* hook_call(PyObject* self, PyObject* args, PyObject* kwargs) {
    auto* hook = reinterpret_cast<GradientHook*>(self);
    Shared<GradientSteps> steps = hook->steps;
    Py_ssize_t count = steps->seen == Seen::AFTER || steps->seen == Seen::GIVEN ? 2 : 1;
    if (PyTuple_GET_SIZE(args) != count || kwargs != nullptr) {
        PyErr_SetString(PyExc_TypeError, "a hook takes gradients");
        return nullptr;
    }
    if (steps->analyses) {
        if (steps->seen == Seen::AFTER && steps->owner != nullptr) outdate(steps->owner);
        return hand_over(hook, args, results(0, nullptr));
    }
    Thread* thread = current;
    Watch* watch = in_force(*steps.get(), thread);
    bool many = PyTuple_Check(PyTuple_GET_ITEM(args, 0));
    if (watch == nullptr || many != (steps->seen != Seen::ARRIVING) ||
        PyTuple_GET_ITEM(args, 0) == Py_None ||
        // Modes and the profiler must not see the driver's own operations.
        (steps->computes && is_observed())) {
        return hand_over(hook, args, results(0, nullptr));
    }
    Owned kept = Owned::share(self), owner = Owned::share(steps->owner);
    Open open(*steps.get());
    Owned values;
    {
        Inside inside(thread);
        values = seen_by(*steps.get(), args, hook->own, &open);
    }
    if (!values) return nullptr;
    for (size_t i = 0; i < steps->steps.size(); ++i) {
        const ProgramStep& step = steps->steps[i];
        Owned result = Owned::share(Py_None);
        if (!step.reaches(values.get())) return hand_over(hook, args, results(i, nullptr));
        if (!step.finds_only_none(values.get())) {
            result = call_step(step, values.get(), thread, watch, false);
        }
        if (!result) return nullptr;
        if (result.get() != Py_None || in_force(*steps.get(), thread) != watch) {
            return hand_over(hook, args, results(i, result.get()));
        }
    }
    Py_RETURN_NONE;
}

void hook_dealloc(PyObject* self) {
    auto* hook = reinterpret_cast<GradientHook*>(self);
    PyTypeObject* type = Py_TYPE(self);
    Py_CLEAR(hook->function);
    Py_CLEAR(hook->own);
    hook->steps.~Shared();
    type->tp_free(self);
    Py_DECREF(type);
}

bool read_ways(PyObject* list, GradientSteps* steps) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        GradientSteps::Way way;
        const char* change;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "iiis", &way.position, &way.item,
                              &way.index, &change)) {
            return false;
        }
        way.change = *change == 'r'   ? GradientSteps::Change::RESHAPE
                     : *change == 't' ? GradientSteps::Change::TRANSPOSE
                                      : GradientSteps::Change::NONE;
        if (way.position < 0 || way.position >= steps->count || way.index < 0) {
            PyErr_SetString(PyExc_ValueError, "no such input or output");
            return false;
        }
        way.is_read = std::any_of(steps->steps.begin(), steps->steps.end(), [&](const auto& step) {
            return step.all || std::find(step.positions.begin(), step.positions.end(),
                                         way.position) != step.positions.end();
        });
        steps->computes |= way.is_read && way.change != GradientSteps::Change::NONE;
        steps->ways.push_back(way);
    }
    return true;
}

PyType_Slot hook_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(hook_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(hook_call)},
    {Py_tp_doc, const_cast<char*>("Routines for gradients at one place of a graph.")},
    {0, nullptr},
};
PyType_Spec hook_spec = {"amanda_driver_torch._native.GradientHook", sizeof(GradientHook), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, hook_slots};

}  // namespace

void GradientSteps::forget() {
    owner = nullptr;
    std::vector<ProgramStep> dropped;
    steps.swap(dropped);
    watch = epoch = execution = op = Owned();
}

bool GradientSteps::reshapes() const {
    return std::any_of(ways.begin(), ways.end(),
                       [](const Way& way) { return way.change == Change::RESHAPE; });
}

int GradientSteps::traverse(visitproc visit, void* arg) const {
    Py_VISIT(watch.get());
    Py_VISIT(execution.get());
    return visit_steps(steps, visit, arg);
}

bool Hooking::read(Seen seen, PyObject* parts, PyObject* owner, PyObject* epoch, PyObject* watch) {
    PyObject *given_function, *given_steps, *where, *one, *two = nullptr, *three = nullptr;
    if (!PyArg_ParseTuple(parts, "OO!OO|OO", &given_function, &PyList_Type, &given_steps, &where,
                          &one, &two, &three)) {
        return false;
    }
    if ((seen == Seen::ARRIVING) != (two == nullptr) || (seen == Seen::GIVEN) != (three != nullptr)) {
        PyErr_SetString(PyExc_TypeError, "a hook needs other parts");
        return false;
    }
    function = Owned::share(given_function);
    steps = Shared<GradientSteps>(new GradientSteps);
    GradientSteps* made = steps.get();
    made->seen = seen;
    if (!read_steps(given_steps, &made->steps)) return false;
    if (seen == Seen::GIVEN) {
        if (!PyList_Check(where) || !route.read(where)) return false;
        made->count = int(PyLong_AsLong(one));
        if (PyErr_Occurred() || !PyList_Check(two) || !read_ways(two, made)) return false;
        if (!PyList_Check(three)) return false;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(three); ++i) {
            int position;
            Py_ssize_t length;
            if (!PyArg_ParseTuple(PyList_GET_ITEM(three, i), "in", &position, &length)) return false;
            made->lengths.emplace_back(position, length);
        }
    } else if (seen == Seen::ARRIVING) {
        made->count = int(PyLong_AsLong(where));
        if (PyErr_Occurred() || !PyList_Check(one) || !read_ways(one, made)) return false;
        if (made->ways.size() != 1) made->seen = Seen::TOGETHER;
    } else {
        place = int(PyLong_AsLong(where));
        if (PyErr_Occurred()) return false;
        made->analyses = one == Py_None;
        if (!made->analyses && !PyDict_Check(one)) {
            PyErr_SetString(PyExc_TypeError, "a hook on a backward op needs its context");
            return false;
        }
        made->execution = Owned::share(one);
        made->op = Owned::share(two);
    }
    made->owner = owner;
    made->epoch = Owned::share(epoch);
    made->watch = Owned::share(watch);
    Owned own;
    if (seen == Seen::GIVEN) {
        if (made->reshapes()) return true;
        own = Owned(PyTuple_New(Py_ssize_t(made->ways.size())));
        for (size_t i = 0; own && i < made->ways.size(); ++i) {
            PyTuple_SET_ITEM(own.get(), Py_ssize_t(i), Py_NewRef(Py_None));
        }
        if (!own) return false;
    }
    hook = make(own.get());
    return bool(hook);
}

Owned Hooking::make(PyObject* held) const {
    Owned made(hook_type->tp_alloc(hook_type, 0));
    if (!made) return made;
    auto* own = reinterpret_cast<GradientHook*>(made.get());
    own->function = Py_NewRef(function.get());
    own->own = Py_XNewRef(held);
    new (&own->steps) Shared<GradientSteps>(steps);
    return made;
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
    return protect(node.get()) && bool(Owned(PyObject_CallMethodOneArg(node.get(), register_hook_dict, tensor)));
}

bool hook_node_of(PyObject* output, PyObject* hook) {
    Owned node(PyObject_GetAttr(output, grad_fn));
    return node && protect(node.get()) && hook_node(node.get(), hook, Seen::BEFORE);
}

namespace {

PyObject* handle_type = nullptr;  // of Python's handles, which number the hooks
// Whether C registers the hook that torch is registering, and so needs no handle.
bool without_handle = false;

// Registers a hook as Python's function does, which is `original`: (hooks or None, hook) ->
// (hooks, handle). Nobody asks for the handles of hooks that C registers.
PyObject* register_quickly(PyObject* original, PyObject* const* args, Py_ssize_t count) {
    static long long last = 0;  // Python's keys are not negative.
    if (!std::exchange(without_handle, false) || count != 2) {
        return PyObject_Vectorcall(original, args, size_t(count), nullptr);
    }
    Owned hooks(args[0] == Py_None ? PyODict_New() : Py_NewRef(args[0])),
        number(PyLong_FromLongLong(--last));
    if (!hooks || !number || PyODict_SetItem(hooks.get(), number.get(), args[1]) < 0) return nullptr;
    return PyTuple_Pack(2, hooks.get(), Py_None);
}

PyMethodDef registration = {
    kRegistration, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(register_quickly)),
    METH_FASTCALL, nullptr};

PyObject* registration_method(PyObject*, PyObject* args) {
    PyObject *original, *handles;
    if (!PyArg_ParseTuple(args, "OO", &original, &handles)) return nullptr;
    Py_XSETREF(handle_type, Py_NewRef(handles));
    return PyCFunction_New(&registration, original);
}

PyMethodDef methods[] = {
    {"registration", registration_method, METH_VARARGS,
     "registration(original, handles, /)\n--\n\n"
     "Return a function that registers the hooks of C without a handle, and others by `original`."},
    {nullptr, nullptr, 0, nullptr},
};

// Returns the handle, or None.
Owned registered(PyObject* node, PyObject* hook, PyObject* name) {
    without_handle = true;
    Owned handle(PyObject_CallMethodOneArg(node, name, hook));
    without_handle = false;
    return handle;
}

}  // namespace

bool hook_node(PyObject* node, PyObject* hook, Seen seen) {
    return bool(registered(node, hook, seen == Seen::BEFORE ? register_prehook : register_hook));
}

Owned hook_before(PyObject* node, PyObject* hook) {
    Owned handle = registered(node, hook, register_prehook);
    if (!handle || handle.get() != Py_None) {
        return Owned(handle ? PyObject_GetAttr(handle.get(), id_name) : nullptr);
    }
    // The program's next hook has this number.
    Owned next(PyObject_GetAttr(handle_type, next_id));
    long long number = next ? PyLong_AsLongLong(next.get()) : -1;
    return Owned(PyErr_Occurred() ? nullptr : PyLong_FromLongLong(number - 1));
}

int add_gradients(PyObject* module) {
    struct Name {
        PyObject** name;
        const char* text;
    };
    for (const Name& name : {Name{&backward_hooks, kBackwardHooks}, Name{&grad_fn, "grad_fn"},
                             Name{&register_hook, "register_hook"},
                             Name{&register_prehook, "register_prehook"},
                             Name{&register_hook_dict, kRegisterHookDict},
                             Name{&reshape, "reshape"}, Name{&transpose, "t"},
                             Name{&open_name, "open"}, Name{&op_name, "op"},
                             Name{&grad_outputs, "grad_outputs"},
                             Name{&grad_inputs, "grad_inputs"}, Name{&id_name, "id"},
                             Name{&next_id, "next_id"}}) {
        if ((*name.name = PyUnicode_InternFromString(name.text)) == nullptr) return -1;
    }
    hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&hook_spec));
    if (hook_type == nullptr || add_routes() < 0 || PyModule_AddFunctions(module, methods) < 0) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "GradientHook", reinterpret_cast<PyObject*>(hook_type));
}

}  // namespace amanda
