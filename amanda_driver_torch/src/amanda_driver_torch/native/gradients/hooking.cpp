// Hooks that torch calls without Python objects, and the registration of all hooks.
#include "gradients/hooking.h"

#include "gradients/unwinding.h"
#include "thread.h"
#include "torch_symbols.h"

namespace amanda {

namespace {

PyObject *backward_hooks, *grad_fn, *register_hook, *register_prehook, *register_hook_dict;
PyObject *id_name, *next_id;

// What torch has to call after a hook that it has called without Python: Python's part of it, or a
// function that raises its exception.
struct Resumption {
    PyObject_HEAD
    PyObject *hook, *done;
    PyObject *type, *value, *trace;
};

PyTypeObject* resumption_type = nullptr;

PyObject* resumption_call(PyObject* self, PyObject* args, PyObject*) {
    auto* own = reinterpret_cast<Resumption*>(self);
    if (own->done == nullptr) {
        PyErr_Restore(std::exchange(own->type, nullptr), std::exchange(own->value, nullptr),
                      std::exchange(own->trace, nullptr));
        return nullptr;
    }
    return hand_over(reinterpret_cast<GradientHook*>(own->hook), args, Owned::share(own->done));
}

void resumption_dealloc(PyObject* self) {
    auto* own = reinterpret_cast<Resumption*>(self);
    PyTypeObject* type = Py_TYPE(self);
    for (PyObject* held : {own->hook, own->done, own->type, own->value, own->trace}) Py_XDECREF(held);
    type->tp_free(self);
    Py_DECREF(type);
}

Owned make_resumption(GradientHook* hook, const Owned& done) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Owned made(resumption_type->tp_alloc(resumption_type, 0));
    auto* own = reinterpret_cast<Resumption*>(made.get());
    if (!made) return made;
    own->hook = Py_NewRef(reinterpret_cast<PyObject*>(hook));
    if (type == nullptr) own->done = Py_XNewRef(done.get());
    own->type = type;
    own->value = value;
    own->trace = trace;
    return made;
}

PyType_Slot resumption_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(resumption_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(resumption_call)},
    {0, nullptr},
};
PyType_Spec resumption_spec = {"amanda_driver_torch._native.Resumption", sizeof(Resumption), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                               resumption_slots};

// A hook in a graph.
class Held {
  public:
    explicit Held(const SharedHook& hook) : hook_(hook) {}
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    PyObject* get() const { return hook_.get(); }
    const GradientSteps& steps() const {
        return *reinterpret_cast<GradientHook*>(get())->steps.get();
    }

    bool retired = false;  // whether other hooks have replaced it
    bool is_over() const { return retired || steps().is_over(); }

    // Calls the routines with `first`, or with one of it. Null if these change nothing but what is
    // `edited`, else what torch has to call.
    Owned call(const Gradients& first, const Gradients* before,
               EditedResults* edited = nullptr) const {
        auto* hook = reinterpret_cast<GradientHook*>(get());
        if (is_over()) return Owned();
        if (hook->steps->analyses) return Owned::share(get());
        Arriving gradients(before != nullptr ? *before : first);
        Owned done;
        if (call_routines(hook, Arriving(first), &gradients, &done, edited)) return Owned();
        if (edited != nullptr) edited->clear();  // Python starts from the node's own results.
        Owned then = make_resumption(hook, done);
        return then ? std::move(then) : Owned::share(get());
    }

  private:
    SharedHook hook_;
};

// Returns what torch has passed, which it then replaces by what it gets.
Gradients unchanged(const Gradients& gradients) {
    return std::move(const_cast<Gradients&>(gradients));
}

class BeforeHook final : public HookBefore {
  public:
    BeforeHook(const SharedHook& hook, When when, size_t number) : hook_(hook), when_(when), number_(number) {}

    Gradients operator()(const Gradients& gradients) override {
        HoldingGil gil;
        Owned then;
        if (when_ == When::OF_OUTPUT) {
            Gradients one(1, gradients.at(number_));
            then = one[0] == undefined_tensor() ? Owned::share(hook_.get()) : hook_.call(one, nullptr);
        } else {
            then = hook_.call(gradients, nullptr);
        }
        if (!then) return unchanged(gradients);
        return call_as_hook(when_, then.get(), gradients, number_);
    }

    void compiled_args(void* args) const override {
        if (!hook_.is_over()) compile_as_hook(when_, hook_.get(), number_, args);
    }

    Held& held() { return hook_; }

  private:
    Held hook_;
    When when_;
    size_t number_;
};

class AfterHook final : public HookAfter {
  public:
    explicit AfterHook(const SharedHook& hook) : hook_(hook) {}

    Gradients operator()(const Gradients& results, const Gradients& gradients) override {
        HoldingGil gil;
        EditedResults edited;
        Owned then = hook_.call(results, &gradients, can_put_tensors() ? &edited : nullptr);
        if (then) return call_as_hook(then.get(), results, gradients);
        Gradients changed = unchanged(results);
        for (const auto& [number, value] : edited) {
            put_tensor(changed[number], *tensor_in(value.get()));
        }
        return changed;
    }

    void compiled_args(void* args) const override {
        if (!hook_.is_over()) compile_as_hook(When::AFTER, hook_.get(), 0, args);
    }

    Held& held() { return hook_; }

  private:
    Held hook_;
};

When when(Seen seen) {
    if (seen == Seen::AFTER || seen == Seen::GIVEN) return When::AFTER;
    return seen == Seen::ARRIVING ? When::OF_OUTPUT : When::BEFORE;
}

// Hooks the node of an output without Python objects, if that may be done.
bool hook_quickly(PyObject* output, const SharedHook& hook, Seen seen) {
    Node* node = can_read_graphs() ? node_of(output) : nullptr;
    if (node == nullptr || !can_hook_in_graph(node, seen)) return false;
    hook_in_graph(node, hook, seen, number_of(output));
    return true;
}

// The virtual functions of our hooks, once there are any.
const void *before_table = nullptr, *after_table = nullptr;

// Calls `function` with each of our hooks on the accumulation into a leaf that is in use.
template <class Function>
void each_of_leaf(const Node* node, Function function) {
    for (When when : {When::BEFORE, When::AFTER}) {
        const void* own = when == When::BEFORE ? before_table : after_table;
        for (void* hook : hooks_of(node, when)) {
            if (*static_cast<const void* const*>(hook) != own) continue;
            Held& held = when == When::BEFORE ? static_cast<BeforeHook*>(hook)->held()
                                              : static_cast<AfterHook*>(hook)->held();
            if (held.steps().life && !held.is_over()) function(held);
        }
    }
}

// (node, life): returns the epoch of the hooks on the accumulation into a leaf that C has
// registered, or None.
PyObject* leaf_epoch(PyObject*, PyObject* args) {
    PyObject *object, *life, *epoch = Py_None;
    if (!PyArg_ParseTuple(args, "OO", &object, &life)) return nullptr;
    if (Node* node = node_in(object)) {
        each_of_leaf(node, [&](Held& held) {
            if (held.steps().life.get() == life && held.steps().epoch) {
                epoch = held.steps().epoch.get();
            }
        });
    }
    return Py_NewRef(epoch);
}

// (node, life): retires these hooks.
PyObject* retire_leaf(PyObject*, PyObject* args) {
    PyObject *object, *life;
    if (!PyArg_ParseTuple(args, "OO", &object, &life)) return nullptr;
    if (Node* node = node_in(object)) {
        each_of_leaf(node, [&](Held& held) {
            held.retired |= held.steps().life.get() == life;
        });
    }
    Py_RETURN_NONE;
}

// (nodes): removes the hooks on accumulations into leaves that do nothing any more.
PyObject* clear_leaves(PyObject*, PyObject* nodes) {
    Owned all(PySequence_Fast(nodes, "clear_leaves(sequence)"));
    if (!all) return nullptr;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.get()); ++i) {
        Node* node = node_in(PySequence_Fast_GET_ITEM(all.get(), i));
        if (node == nullptr) continue;
        remove_hooks(node, When::BEFORE, [](const void* hook) {
            return *static_cast<const void* const*>(hook) == before_table &&
                   static_cast<BeforeHook*>(const_cast<void*>(hook))->held().is_over();
        });
        remove_hooks(node, When::AFTER, [](const void* hook) {
            return *static_cast<const void* const*>(hook) == after_table &&
                   static_cast<AfterHook*>(const_cast<void*>(hook))->held().is_over();
        });
    }
    Py_RETURN_NONE;
}

}  // namespace

bool can_hook_leaf(const Node* node) {
    for (When when : {When::BEFORE, When::AFTER}) {
        for (const void* hook : hooks_of(node, when)) {
            if (is_pythons(hook, when)) return false;
        }
    }
    return true;
}

void hook_leaf(Node* node, const std::vector<Hooking>& hooks) {
    bool present = false;
    each_of_leaf(node, [&](Held& held) {
        for (const Hooking& hooking : hooks) present |= held.get() == hooking.hook.get();
    });
    if (present || hooks.empty()) return;
    each_of_leaf(node, [&](Held& held) {
        held.retired |= held.steps().life.get() == hooks[0].steps->life.get();
    });
    for (const Hooking& hooking : hooks) {
        hook_in_graph(node, hooking.hook, hooking.steps->seen);
    }
}

bool can_hook_in_graph(const Node* node, Seen seen) { return can_hook(node, when(seen)); }

void hook_in_graph(Node* node, const SharedHook& hook, Seen seen, size_t number) {
    if (when(seen) == When::AFTER) {
        auto* made = new AfterHook(hook);
        after_table = *reinterpret_cast<const void* const*>(made);
        add_hook(node, made);
    } else {
        auto* made = new BeforeHook(hook, when(seen), number);
        before_table = *reinterpret_cast<const void* const*>(made);
        add_hook(node, when(seen), made);
    }
}

bool hook_tensor(PyObject* tensor, const SharedHook& shared) {
    if (hook_quickly(tensor, shared, Seen::ARRIVING)) return true;
    PyObject* hook = shared.get();
    Owned hooks(PyObject_GetAttr(tensor, backward_hooks)), node, add;
    if (hooks.get() == Py_None) {
        node = Owned(PyObject_GetAttr(tensor, grad_fn));
        if (!node) return false;
        if (node.get() != Py_None) add = Owned(PyObject_GetAttr(node.get(), register_hook_dict));
    }
    // Another release may lack the attributes.
    if (hooks.get() != Py_None || (node.get() != Py_None && !add)) {
        PyErr_Clear();
        return bool(Owned(PyObject_CallMethodOneArg(tensor, register_hook, hook)));
    }
    // What `Tensor.register_hook` does, without an object for a handle that nobody keeps.
    hooks = Owned(PyODict_New());
    if (!hooks || PyODict_SetItem(hooks.get(), hook, hook) < 0 ||
        PyObject_SetAttr(tensor, backward_hooks, hooks.get()) < 0) {
        return false;
    }
    if (!add) return true;
    return protect(node.get()) && bool(Owned(PyObject_CallOneArg(add.get(), tensor)));
}

bool hook_node_of(PyObject* output, const SharedHook& hook) {
    if (hook_quickly(output, hook, Seen::TOGETHER)) return true;
    Owned node(PyObject_GetAttr(output, grad_fn));
    return node && protect(node.get()) && hook_node(node.get(), hook.get(), Seen::BEFORE);
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
    {"clear_leaves", clear_leaves, METH_O,
     "clear_leaves(nodes, /)\n--\n\nRemove hooks that do nothing any more from leaves' nodes, "
     "which must not run now."},
    {"leaf_epoch", leaf_epoch, METH_VARARGS,
     "leaf_epoch(node, life, /)\n--\n\n"
     "Return the epoch of the hooks that C has registered on a leaf's node; else None."},
    {"retire_leaf", retire_leaf, METH_VARARGS,
     "retire_leaf(node, life, /)\n--\n\nLet these hooks do nothing any more."},
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

int add_hooking(PyObject* module) {
    struct Name {
        PyObject** name;
        const char* text;
    };
    for (const Name& name : {Name{&backward_hooks, kBackwardHooks}, Name{&grad_fn, "grad_fn"},
                             Name{&register_hook, "register_hook"},
                             Name{&register_prehook, "register_prehook"},
                             Name{&register_hook_dict, kRegisterHookDict}, Name{&id_name, "id"},
                             Name{&next_id, "next_id"}}) {
        if ((*name.name = PyUnicode_InternFromString(name.text)) == nullptr) return -1;
    }
    resumption_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&resumption_spec));
    if (resumption_type == nullptr) return -1;
    return PyModule_AddFunctions(module, methods);
}

}  // namespace amanda
