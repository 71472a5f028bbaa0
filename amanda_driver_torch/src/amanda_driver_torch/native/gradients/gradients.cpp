// What a hook on gradients does when it is called.
#include "gradients/gradients.h"

#include <algorithm>

#include "gradients/edits.h"
#include "gradients/nodes.h"
#include "gradients/unwinding.h"
#include "thread.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

PyTypeObject* hook_type = nullptr;
PyObject *reshape, *transpose, *permute, *open_name, *op_name, *grad_outputs, *grad_inputs;

// Returns the watch of this thread if the steps are valid under it now, else null.
Watch* in_force(const GradientSteps& steps, const Thread* thread) {
    if (steps.owner == nullptr || thread == nullptr || thread->watch == nullptr) return nullptr;
    // Another thread is taking the watch away, and does not wait for a pass that began after that.
    if (thread->quiet >= HUSHED) return nullptr;
    Watch* watch = thread->watch;
    if (reinterpret_cast<PyObject*>(watch) != steps.watch.get() || !watch->enabled(thread) ||
        !watch->caches(steps.epoch.get()) || thread->recomputing || gradients_enabled()) {
        return nullptr;
    }
    return watch;
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

// Returns a node's result as the gradient of an input of `shape`, whose dimensions it has in another
// order.
Owned ordered(PyObject* result, const std::vector<uint8_t>& order, PyObject* shape) {
    int64_t inverse[GradientSteps::MOST_ORDERED];
    Owned sizes(PyTuple_New(Py_ssize_t(order.size())));
    for (size_t i = 0; sizes && i < order.size(); ++i) {
        PyTuple_SET_ITEM(sizes.get(), Py_ssize_t(i), Py_NewRef(PyTuple_GET_ITEM(shape, order[i])));
        inverse[order[i]] = int64_t(i);
    }
    Owned value(sizes ? changed(result, GradientSteps::Change::RESHAPE, sizes.get()) : Owned());
    if (!value) return value;
    void* const* tensor = can_compute() ? tensor_in(value.get()) : nullptr;
    if (tensor != nullptr) {
        Owned found(permuted(*tensor, inverse, order.size()));
        if (found) return found;
        PyErr_Clear();
    }
    for (size_t i = 0; i < order.size(); ++i) {
        PyTuple_SetItem(sizes.get(), Py_ssize_t(i), PyLong_FromLongLong(inverse[i]));
    }
    return Owned(PyObject_CallMethodOneArg(value.get(), permute, sizes.get()));
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
        PyObject* shape = PyTuple_GET_ITEM(shapes, Py_ssize_t(i));
        Owned value = way.change == GradientSteps::Change::PERMUTE
                          ? ordered(result.get(), way.order, shape)
                          : changed(result.get(), way.change, shape);
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
    if (!steps.needs_values && !steps.needs_context) return Owned(PyList_New(0));
    Owned values = first.list();
    if (!values || !steps.needs_context) return values;
    if (steps.seen == Seen::BEFORE) {
        return open->lend(grad_outputs, values.get()) ? std::move(values) : Owned();
    }
    Owned gradients = before->list();
    return gradients && open->lend(grad_outputs, gradients.get()) &&
                   open->lend(grad_inputs, values.get())
               ? std::move(values)
               : Owned();
}

// Edits a gradient in `values`, and the node's result that it is, by a routine's result. False if
// Python has to.
bool edit(const GradientSteps& steps, const ProgramStep& step, PyObject* values, PyObject* result,
          EditedResults* edited) {
    if (edited == nullptr || step.all || step.positions.size() != 1) return false;
    int position = step.positions[0];
    auto way = std::find_if(steps.ways.begin(), steps.ways.end(), [&](const auto& one) {
        return one.position == position && one.item < 0 &&
               one.change == GradientSteps::Change::NONE;
    });
    if (way == steps.ways.end() ||
        !is_accepted(step, PyList_GET_ITEM(values, position), result)) {
        return false;
    }
    edited->emplace_back(size_t(way->index), Owned::share(result));
    return PyList_SetItem(values, position, Py_NewRef(result)) == 0;
}

}  // namespace

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

bool call_routines(GradientHook* hook, const Arriving& first, const Arriving* before, Owned* done,
                   EditedResults* edited) {
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
    Edits edits;
    for (size_t i = 0; i < steps->steps.size(); ++i) {
        const ProgramStep& step = steps->steps[i];
        Owned result = Owned::share(Py_None);
        if (!step.reaches(values.get())) {
            *done = edits.so_far(i);
            return false;
        }
        if (!step.finds_only_none(values.get())) {
            result = call_step(step, values.get(), thread, watch, false);
        }
        if (!result) return false;
        bool forced = in_force(*steps.get(), thread) == watch;
        if (forced && result.get() == Py_None) continue;
        if (!forced || !edit(*steps.get(), step, values.get(), result.get(), edited)) {
            *done = edits.so_far(i, result.get());
            return false;
        }
        ++watch->edits;
        edits.keep(i, result.get());
    }
    return true;
}

namespace {

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
                     : *change        ? GradientSteps::Change::PERMUTE
                                      : GradientSteps::Change::NONE;
        if (way.change == GradientSteps::Change::PERMUTE) {
            for (; *change; ++change) way.order.push_back(uint8_t(*change - '0'));
            if (std::is_sorted(way.order.begin(), way.order.end())) {
                way.change = GradientSteps::Change::RESHAPE;
            }
            if (way.order.size() > GradientSteps::MOST_ORDERED) {
                PyErr_SetString(PyExc_ValueError, "too many dimensions");
                return false;
            }
        }
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
                       [](const Way& way) { return way.reshapes(); });
}

int GradientSteps::traverse(visitproc visit, void* arg) const {
    Py_VISIT(watch.get());
    Py_VISIT(execution.get());
    return visit_steps(steps, visit, arg);
}

bool Hooking::read(Seen seen, PyObject* parts, PyObject* owner, PyObject* epoch, PyObject* watch) {
    PyObject *given_function, *given_steps, *where, *one, *two = nullptr, *three = nullptr;
    if (!PyArg_ParseTuple(parts, "OOOO|OO", &given_function, &given_steps, &where, &one, &two,
                          &three)) {
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
    made->needs_context = !are_notes(made->steps);
    made->needs_values = std::any_of(made->steps.begin(), made->steps.end(), [](const auto& step) {
        return step.all || !step.positions.empty();
    });
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

int add_gradients(PyObject* module) {
    struct Name {
        PyObject** name;
        const char* text;
    };
    for (const Name& name : {Name{&reshape, "reshape"}, Name{&transpose, "t"}, Name{&permute, "permute"},
                             Name{&open_name, "open"}, Name{&op_name, "op"},
                             Name{&grad_outputs, "grad_outputs"},
                             Name{&grad_inputs, "grad_inputs"}}) {
        if ((*name.name = PyUnicode_InternFromString(name.text)) == nullptr) return -1;
    }
    hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&hook_spec));
    if (hook_type == nullptr || add_routes() < 0) return -1;
    return PyModule_AddObjectRef(module, "GradientHook", reinterpret_cast<PyObject*>(hook_type));
}

}  // namespace amanda
