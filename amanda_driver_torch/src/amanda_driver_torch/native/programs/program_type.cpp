// Programs as Python objects: creation and destruction.
#include "fields.h"
#include "identity/identity.h"
#include "programs/program_parts.h"
#include "watch.h"

namespace amanda {

namespace {

PyTypeObject* program_type = nullptr;

bool is_true(const Owned& field) { return PyObject_IsTrue(field.get()) == 1; }

// Reads a list of pairs of numbers.
template <class Number>
bool read_pairs(PyObject* list, std::vector<std::pair<int, Number>>* pairs) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        int first;
        Py_ssize_t second;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "in", &first, &second)) return false;
        pairs->emplace_back(first, Number(second));
    }
    return true;
}

// Reads a list of places of tensors among the arguments.
bool read_places(PyObject* list, std::vector<At>* places) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        At at;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "ii", &at.argument, &at.item)) return false;
        places->push_back(at);
    }
    return true;
}

// (which outputs have nodes, hooks).
bool read_arrivals(PyObject* given, PyObject* program, PyObject* epoch, PyObject* watch) {
    ProgramParts* parts = reinterpret_cast<Program*>(program)->parts;
    PyObject *made, *hooks;
    if (!PyArg_ParseTuple(given, "O!O!", &PyList_Type, &made, &PyList_Type, &hooks)) return false;
    parts->arrives = true;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(made); ++i) {
        parts->made_outputs.push_back(PyList_GET_ITEM(made, i) == Py_True);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(hooks); ++i) {
        Hooking arrival;
        if (!arrival.read(Seen::ARRIVING, PyList_GET_ITEM(hooks, i), program, epoch, watch)) {
            return false;
        }
        parts->arrivals.push_back(std::move(arrival));
    }
    return true;
}

// (made, autocast, laid, hooks), each hook with the arguments whose shapes it needs.
bool read_gradient_nodes(PyObject* given, PyObject* program, PyObject* epoch, PyObject* watch) {
    ProgramParts* parts = reinterpret_cast<Program*>(program)->parts;
    PyObject *autocast, *laid, *hooks;
    if (!PyArg_ParseTuple(given, "LOO!O!", &parts->made, &autocast, &PyList_Type, &laid,
                          &PyList_Type, &hooks)) {
        return false;
    }
    parts->meets = true;
    parts->autocast = Owned::share(autocast);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(laid); ++i) {
        ProgramParts::Laid one;
        int contiguous;
        PyObject* dtype;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(laid, i), "iiipOi", &one.at.argument, &one.at.item,
                              &one.dimensions, &contiguous, &dtype, &one.ones)) {
            return false;
        }
        one.contiguous = contiguous != 0;
        one.dtype = Owned::share(dtype);
        parts->laid.push_back(std::move(one));
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(hooks); ++i) {
        PyObject *hook, *arguments;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(hooks, i), "OO!", &hook, &PyList_Type, &arguments)) {
            return false;
        }
        Hooking hooking;
        if (!hooking.read(Seen::GIVEN, hook, program, epoch, watch)) return false;
        std::vector<At> shaped;
        if (!read_places(arguments, &shaped)) return false;
        parts->gradient_nodes.push_back(std::move(hooking));
        parts->shaped.push_back(std::move(shaped));
    }
    return true;
}

bool read_gradients(PyObject* given, PyObject* program, PyObject* epoch, PyObject* watch) {
    ProgramParts* parts = reinterpret_cast<Program*>(program)->parts;
    GradientFields fields;
    if (!fields.read(given)) return false;
    PyObject *taps = fields.taps.get(), *required = fields.required.get(),
             *arrivals = fields.arrivals.get(), *nodes = fields.nodes.get();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(taps); ++i) {
        PyObject *function, *arguments;
        ProgramParts::Tap tap;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(taps, i), "OO!", &function, &PyList_Type,
                              &arguments) ||
            !read_places(arguments, &tap.arguments)) {
            return false;
        }
        tap.function = Owned::share(function);
        parts->taps.push_back(std::move(tap));
    }
    if (!read_pairs(fields.lengths.get(), &parts->lengths)) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(required); ++i) {
        At at;
        int requires_one;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(required, i), "iip", &at.argument, &at.item,
                              &requires_one)) {
            return false;
        }
        parts->required.emplace_back(at, requires_one != 0);
    }
    parts->in_place = is_true(fields.in_place);
    if (fields.saved_hooks.get() != Py_None) parts->saved_hooks = std::move(fields.saved_hooks);
    if (arrivals != Py_None && !read_arrivals(arrivals, program, epoch, watch)) return false;
    return nodes == Py_None || read_gradient_nodes(nodes, program, epoch, watch);
}

// Finds the routines whose results may be used again. False with an exception.
bool read_stamps(ProgramParts* parts, const Watch* watch) {
    static PyObject *stamp_name = PyUnicode_InternFromString("stamp"),
                    *fresh_name = PyUnicode_InternFromString("fresh");
    for (ProgramStep& step : parts->before) {
        auto* type = reinterpret_cast<PyObject*>(Py_TYPE(step.routine.get()));
        if (type != watch->memoized || parts->aliases || step.positions.size() != 1) continue;
        int source = parts->sources[size_t(step.positions[0])];
        if (source < 0 || step.positions[0] == parts->spread) continue;
        auto* kind = reinterpret_cast<PyObject*>(parts->types[size_t(source)]);
        if (kind != watch->identity->tensor && kind != watch->identity->parameter) continue;
        Owned stamp(PyObject_GetAttr(step.routine.get(), stamp_name)),
            fresh(PyObject_GetAttr(step.routine.get(), fresh_name));
        if (!stamp || !fresh) return false;
        if (PyList_Check(stamp.get()) && PyList_GET_SIZE(stamp.get()) == 1) {
            step.stamp = std::move(stamp);
            if (fresh.get() != Py_None) step.fresh = std::move(fresh);
        }
    }
    return true;
}

// Program(fields).
PyObject* program_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* given;
    if (!PyArg_ParseTuple(args, "O:Program", &given)) return nullptr;
    ProgramFields fields;
    if (!fields.read(given)) return nullptr;
    PyObject *epoch = fields.epoch.get(), *watch = fields.watch.get(),
             *operands = fields.operands.get(), *keywords = fields.keywords.get(),
             *sources = fields.sources.get(), *defaults = fields.defaults.get(),
             *fixed = fields.fixed.get(), *outs = fields.outs.get();
    if (!Py_IS_TYPE(watch, watch_type) || PyTuple_GET_SIZE(sources) > PyTuple_GET_SIZE(defaults)) {
        PyErr_SetString(PyExc_TypeError, "a program needs a watch, and a default for each position");
        return nullptr;
    }
    Owned self(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    auto* parts = reinterpret_cast<Program*>(self.get())->parts = new ProgramParts;
    parts->epoch = fields.epoch;
    parts->kinds.reserve(size_t(PyTuple_GET_SIZE(operands)));
    parts->types.reserve(size_t(PyTuple_GET_SIZE(operands)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(operands); ++i) {
        PyTypeObject* kind = Py_TYPE(PyTuple_GET_ITEM(operands, i));
        parts->kinds.push_back(Owned::share(reinterpret_cast<PyObject*>(kind)));
        parts->types.push_back(kind);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keywords); ++i) {
        PyObject* name = Py_NewRef(PyTuple_GET_ITEM(keywords, i));
        PyUnicode_InternInPlace(&name);
        parts->keywords.emplace_back(name);
    }
    parts->sources.reserve(size_t(PyTuple_GET_SIZE(sources)));
    parts->defaults.reserve(size_t(PyTuple_GET_SIZE(sources)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); ++i) {
        parts->sources.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(sources, i))));
        parts->defaults.push_back(Owned::share(PyTuple_GET_ITEM(defaults, i)));
    }
    parts->execution = fields.execution;
    parts->context = fields.context;
    parts->nodes = PyLong_AsLong(fields.nodes.get());
    parts->with_gradients = is_true(fields.with_gradients);
    if (fields.writes.get() != Py_None) parts->writes = fields.writes;
    parts->aliases = is_true(fields.aliases);
    parts->assigns = is_true(fields.assigns);
    parts->spread = int(PyLong_AsLong(fields.spread.get()));
    parts->outputs = PyLong_AsLong(fields.outputs.get());
    if (PyErr_Occurred()) return nullptr;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(fixed); ++i) {
        int argument;
        PyObject* value;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(fixed, i), "iO", &argument, &value)) return nullptr;
        parts->fixed.emplace_back(argument, Owned::share(value));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outs); ++i) {
        parts->outs.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(outs, i))));
    }
    PyObject* gradients = fields.gradients.get();
    if (gradients != Py_None && !read_gradients(gradients, self.get(), epoch, watch)) return nullptr;
    if (parts->types.size() > MOST_OPERANDS) {
        PyErr_SetString(PyExc_OverflowError, "too many operands");
        return nullptr;
    }
    if (!read_steps(fields.before.get(), &parts->before) ||
        !read_steps(fields.after.get(), &parts->after) ||
        !read_stamps(parts, reinterpret_cast<Watch*>(watch))) {
        return nullptr;
    }
    parts->needs_context = !are_notes(parts->before) || !are_notes(parts->after) ||
                           parts->hooks_gradients() || parts->assigns;
    return self.release();
}

void program_dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    delete reinterpret_cast<Program*>(self)->parts;
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

int program_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    ProgramParts* parts = reinterpret_cast<Program*>(self)->parts;
    if (parts == nullptr) return 0;
    if (int stop = visit_steps(parts->before, visit, arg)) return stop;
    if (int stop = visit_steps(parts->after, visit, arg)) return stop;
    Py_VISIT(parts->execution.get());
    Py_VISIT(parts->context.get());
    for (const ProgramParts::Tap& tap : parts->taps) Py_VISIT(tap.function.get());
    for (const auto* hooks : {&parts->arrivals, &parts->gradient_nodes}) {
        for (const Hooking& hooking : *hooks) {
            if (int stop = hooking.steps->traverse(visit, arg)) return stop;
        }
    }
    return 0;
}

int program_clear(PyObject* self) {
    auto* program = reinterpret_cast<Program*>(self);
    if (program->parts == nullptr) return 0;
    auto* empty = new ProgramParts;
    std::swap(program->parts, empty);
    delete empty;
    return 0;
}

// Whether it holds nothing but what it calls: no hooks on gradients, and no results.
PyObject* program_is_plain(PyObject* self, void*) {
    ProgramParts* parts = reinterpret_cast<Program*>(self)->parts;
    bool plain = !parts->hooks_gradients() && !parts->arrives && !parts->meets;
    for (const auto* steps : {&parts->before, &parts->after}) {
        for (const ProgramStep& step : *steps) plain = plain && !step.stamp;
    }
    return PyBool_FromLong(plain);
}

PyGetSetDef program_properties[] = {
    {"is_plain", program_is_plain, nullptr, "Whether another session may use it.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot program_slots[] = {
    {Py_tp_getset, program_properties},
    {Py_tp_new, reinterpret_cast<void*>(program_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(program_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(program_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(program_clear)},
    {Py_tp_doc, const_cast<char*>("The plan of one op, in the form that C executes.")},
    {0, nullptr},
};
PyType_Spec program_spec = {"amanda_driver_torch._native.Program", sizeof(Program), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, program_slots};

}  // namespace

ProgramParts::~ProgramParts() {
    for (auto* hooks : {&arrivals, &gradient_nodes}) {
        for (Hooking& hooking : *hooks) hooking.steps->forget();
    }
}

bool is_program(PyObject* object) { return object != nullptr && Py_TYPE(object) == program_type; }

int add_program(PyObject* module) {
    name_strings();
    program_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&program_spec));
    if (program_type == nullptr) return -1;
    return PyModule_AddObjectRef(module, "Program", reinterpret_cast<PyObject*>(program_type));
}

}  // namespace amanda
