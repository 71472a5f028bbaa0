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
    void* const* tensor = can_compute() ? tensor_in(result) : nullptr;
    if (tensor != nullptr && change != GradientSteps::Change::NONE) {
        PyObject* found = nullptr;
        if (change == GradientSteps::Change::TRANSPOSE) {
            found = transposed(*tensor);
        } else {
            int64_t sizes[MOST_DIMENSIONS];
            Py_ssize_t count = PyTuple_GET_SIZE(shape);
            for (Py_ssize_t i = 0; i < count && i < MOST_DIMENSIONS; ++i) {
                sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
            }
            if (count <= MOST_DIMENSIONS) {
                const int64_t* own = sizes_of(*tensor);
                if (own != nullptr && layout_of(*tensor).dimensions == count &&
                    std::equal(own, own + count, sizes)) {
                    return Owned::share(result);
                }
                found = reshaped(*tensor, sizes, size_t(count));
            }
        }
        if (found != nullptr) return Owned(found);
        PyErr_Clear();  // The Python function says what is wrong.
    }
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

// The gradients with which a hook is called, by Python or by torch.
class Arriving {
  public:
    explicit Arriving(PyObject* tuple) : tuple_(tuple) {}
    explicit Arriving(const Gradients& gradients) : gradients_(&gradients) {}

    size_t size() const {
        return tuple_ != nullptr ? size_t(PyTuple_GET_SIZE(tuple_)) : gradients_->size();
    }
    Owned operator[](size_t number) const {
        return tuple_ != nullptr ? Owned::share(PyTuple_GET_ITEM(tuple_, Py_ssize_t(number)))
                                 : Owned(wrap((*gradients_)[number]));
    }
    Owned list() const {
        Owned values(PyList_New(Py_ssize_t(size())));
        for (size_t i = 0; values && i < size(); ++i) {
            Owned value = (*this)[i];
            if (!value) return value;
            PyList_SET_ITEM(values.get(), Py_ssize_t(i), value.release());
        }
        return values;
    }

  private:
    PyObject* tuple_ = nullptr;
    const Gradients* gradients_ = nullptr;
};

// Returns the gradients of inputs, made of a node's results.
Owned given(const GradientSteps& steps, const Arriving& results, PyObject* shapes) {
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
        if (size_t(way.index) >= results.size()) {
            PyErr_SetString(PyExc_SystemError, "a node has fewer results than it had");
            return Owned();
        }
        Owned result = results[size_t(way.index)];
        if (!result) return result;
        if (result.get() == Py_None) continue;
        Owned value = changed(result.get(), way.change, PyTuple_GET_ITEM(shapes, Py_ssize_t(i)));
        if (!value) return value;
        if (way.item < 0) {
            PyList_SetItem(values.get(), way.position, value.release());
        } else {
            PyList_SetItem(PyList_GET_ITEM(values.get(), way.position), way.item, value.release());
        }
    }
    return values;
}

// Returns the values for the routines of a hook, as a list. `before`: the gradients before a node,
// if the hook comes after it.
Owned seen_by(const GradientSteps& steps, const Arriving& first, const Arriving* before,
              PyObject* shapes, Open* open) {
    if (steps.seen == Seen::ARRIVING || steps.seen == Seen::TOGETHER) {
        Owned values = nothing(steps.count);
        for (const GradientSteps::Way& way : steps.ways) {
            size_t index = steps.seen == Seen::ARRIVING ? 0 : size_t(way.index);
            if (index >= first.size()) {
                PyErr_SetString(PyExc_SystemError, "a node has fewer gradients than it had");
                return Owned();
            }
            Owned gradient = first[index];
            if (!gradient || !values) return Owned();
            PyList_SetItem(values.get(), way.position, gradient.release());
        }
        return values;
    }
    if (steps.seen == Seen::GIVEN) return given(steps, first, shapes);
    Owned values = first.list();
    if (!values) return values;
    if (steps.seen == Seen::BEFORE) {
        return open->lend(grad_outputs, values.get()) ? std::move(values) : Owned();
    }
    Owned gradients = before->list();
    return gradients && open->lend(grad_outputs, gradients.get()) &&
                   open->lend(grad_inputs, values.get())
               ? std::move(values)
               : Owned();
}

// Calls the routines of a hook. Returns null with an exception, or if Python has to go on: from the
// results in `done`.
bool call_routines(GradientHook* hook, const Arriving& first, const Arriving* before, Owned* done) {
    Shared<GradientSteps> steps = hook->steps;
    Thread* thread = current;
    Watch* watch = in_force(*steps.get(), thread);
    // Modes and the profiler must not see the driver's own operations.
    if (watch == nullptr || (steps->computes && is_observed())) {
        *done = results(0, nullptr);
        return false;
    }
    Owned kept = Owned::share(reinterpret_cast<PyObject*>(hook)), owner = Owned::share(steps->owner);
    Open open(*steps.get());
    Owned values;
    {
        Inside inside(thread);
        values = seen_by(*steps.get(), first, before, hook->own, &open);
    }
    if (!values) return false;
    for (size_t i = 0; i < steps->steps.size(); ++i) {
        const ProgramStep& step = steps->steps[i];
        Owned result = Owned::share(Py_None);
        if (!step.reaches(values.get())) {
            *done = results(i, nullptr);
            return false;
        }
        if (!step.finds_only_none(values.get())) {
            result = call_step(step, values.get(), thread, watch, false);
        }
        if (!result) return false;
        if (result.get() != Py_None || in_force(*steps.get(), thread) != watch) {
            *done = results(i, result.get());
            return false;
        }
    }
    return true;
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
    PyObject* first = PyTuple_GET_ITEM(args, 0);
    if (PyTuple_Check(first) != (steps->seen != Seen::ARRIVING) || first == Py_None) {
        return hand_over(hook, args, results(0, nullptr));
    }
    PyObject* second = count == 2 ? PyTuple_GET_ITEM(args, 1) : nullptr;
    Arriving arriving(steps->seen == Seen::ARRIVING ? args : first), before(second);
    Owned done;
    if (call_routines(hook, arriving, &before, &done)) Py_RETURN_NONE;
    return PyErr_Occurred() ? nullptr : hand_over(hook, args, done);
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

class HoldingGil {
  public:
    HoldingGil() : state_(PyGILState_Ensure()) {}
    ~HoldingGil() { PyGILState_Release(state_); }
    HoldingGil(const HoldingGil&) = delete;
    HoldingGil& operator=(const HoldingGil&) = delete;

  private:
    PyGILState_STATE state_;
};

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

    // Calls the routines with `first`, or with one of it. Null if these change nothing, else what
    // torch has to call.
    Owned call(const Gradients& first, const Gradients* before) const {
        auto* hook = reinterpret_cast<GradientHook*>(get());
        if (is_over()) return Owned();
        if (hook->steps->analyses) return Owned::share(get());
        Arriving gradients(before != nullptr ? *before : first);
        Owned done;
        if (call_routines(hook, Arriving(first), &gradients, &done)) return Owned();
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
        Owned then = hook_.call(results, &gradients);
        if (!then) return unchanged(results);
        return call_as_hook(then.get(), results, gradients);
    }

    void compiled_args(void* args) const override {
        if (!hook_.is_over()) compile_as_hook(When::AFTER, hook_.get(), 0, args);
    }

    Held& held() { return hook_; }

  private:
    Held hook_;
};

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
    hook = share_hook(make(own.get()));
    return bool(hook);
}

SharedHook share_hook(Owned hook) {
    if (!hook) return nullptr;
    return SharedHook(hook.release(), [](PyObject* released) {
        if (!Py_IsInitialized()) return;  // The interpreter has ended, and its objects with it.
        if (PyGILState_Check()) {
            Py_DECREF(released);
        } else {
            HoldingGil gil;
            Py_DECREF(released);
        }
    });
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

namespace {

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

}  // namespace

namespace {

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
    resumption_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&resumption_spec));
    hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&hook_spec));
    if (resumption_type == nullptr || hook_type == nullptr || add_routes() < 0 || PyModule_AddFunctions(module, methods) < 0) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "GradientHook", reinterpret_cast<PyObject*>(hook_type));
}

}  // namespace amanda
