// Calls of modules. The scope is predicted from the module called last.
#include "interception/modules.h"

#include "identity/identity.h"
#include "interception/calls.h"
#include "thread.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

// The function that is replaced as `nn.Module.__call__`.
PyObject* module_original = nullptr;
PyObject *modules_name = nullptr, *dead_name = nullptr;

// The cache is bounded, since some programs make new modules in each iteration.
constexpr size_t MANY = 4096;

}  // namespace

// A module that was moved to another parent has another path.
COLD bool Link::is_among(PyObject* attributes, PyObject* module) {
#if AMANDA_DICT_VERSIONS
    modules = nullptr;
#endif
    PyObject* children = PyDict_GetItemWithError(attributes, modules_name);
    if (children == nullptr || !PyDict_Check(children) ||
        PyDict_GetItemWithError(children, name.get()) != module) {
        PyErr_Clear();
        return false;
    }
#if AMANDA_DICT_VERSIONS
    modules = children;
    attributes_version = version(attributes);
    modules_version = version(children);
#endif
    return true;
}

COLD bool ScopeInfo::Child::is_held(PyObject* called) {
    for (size_t i = 0; i <= links.size(); ++i) {
        Link& one = i == 0 ? link : links[i - 1];
        PyObject* holder = PyWeakref_GET_OBJECT(one.owner.get());
        if (holder == Py_None || !one.holds(holder, called)) return false;
        called = holder;
    }
    return true;
}

namespace {

bool read_links(PyObject* holders, ScopeInfo::Child* child) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(holders); ++i) {
        PyObject *owner, *name;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(holders, i), "OO", &owner, &name)) return false;
        Link link;
        link.owner = Owned(PyWeakref_NewRef(owner, nullptr));
        link.name = Owned::share(name);
        link.address = owner;
        if (!link.owner) return false;
        if (i == 0) {
            child->held = true;
            child->link = std::move(link);
        } else {
            child->links.push_back(std::move(link));
        }
    }
    return true;
}

// The common case of list.append() and list.pop().
INLINE bool enter(PyObject* list, Activation* activation) {
    auto* object = reinterpret_cast<PyObject*>(activation);
    Py_ssize_t size = PyList_GET_SIZE(list);
    if (size >= reinterpret_cast<PyListObject*>(list)->allocated) {
        return PyList_Append(list, object) == 0;
    }
    PyList_SET_ITEM(list, size, Py_NewRef(object));
    Py_SET_SIZE(list, size + 1);
    return true;
}

INLINE void leave(PyObject* list, Activation* activation) {
    Py_ssize_t size = PyList_GET_SIZE(list);
    // If `apply` ended meanwhile, the list was cleared.
    if (size != 0 && PyList_GET_ITEM(list, size - 1) == reinterpret_cast<PyObject*>(activation)) {
        Py_SET_SIZE(list, size - 1);
        Py_DECREF(activation);
    }
}

// Null without an exception is a module that only wraps another one.
COLD ScopeInfo* find_child(Watch* watch, Table<ScopeInfo::Child>* children, Activation* parent,
                      PyObject* module) {
    ScopeInfo::Child* known = children->find(key_of(module));
    if (known != nullptr && known->is(module, parent != nullptr ? parent->progress.module : nullptr)) {
        return known->info.get();
    }
    Owned entered(PyObject_CallFunctionObjArgs(
        watch->enter_module, module,
        parent != nullptr ? reinterpret_cast<PyObject*>(parent) : Py_None, nullptr));
    if (!entered || entered.get() == Py_None) return nullptr;
    PyObject *scope, *holders;
    if (!PyArg_ParseTuple(entered.get(), "OO!", &scope, &PyList_Type, &holders)) return nullptr;
    ScopeInfo* info = watch->identity->info_of(scope);
    if (info == nullptr) return nullptr;
    ScopeInfo::Child child;
    child.info = Shared<ScopeInfo>(info);
    child.module = Owned(PyWeakref_NewRef(module, nullptr));
    if (!child.module || !read_links(holders, &child)) return nullptr;
    if (children->size() > MANY) children->clear();
    children->at(key_of(module)) = std::move(child);
    return info;
}

// Returns the scope of a module called inside `parent`, or at top level if that is null.
COLD ScopeInfo* child_of(Watch* watch, Activation* parent, PyObject* module) {
    if (parent == nullptr) return find_child(watch, &watch->identity->roots, nullptr, module);
    Progress* progress = &parent->progress;
    if (!progress->info) {
        ScopeInfo* info = watch->identity->info_of(parent->scope());
        if (info == nullptr) return nullptr;
        progress->info = Shared<ScopeInfo>(info);
    }
    std::vector<ScopeInfo::Child>& order = progress->info->order;
    size_t place = progress->child++;
    Table<ScopeInfo::Child>* children = &progress->info->children;
    ScopeInfo* info = find_child(watch, children, parent, module);
    if (info == nullptr) --progress->child;
    if (info == nullptr || place >= MANY) return info;
    if (place >= order.size()) order.resize(place + 1);
    order[place] = *children->find(key_of(module));
    return info;
}

// The same if it follows the same module as last time, whose scope is then next to it in memory.
// Null otherwise.
INLINE ScopeInfo* next_child(Activation* parent, PyObject* module) {
    Progress& progress = parent->progress;
    if (!progress.info) return nullptr;
    std::vector<ScopeInfo::Child>& order = progress.info->order;
    size_t place = progress.child;
    if (place >= order.size() || !order[place].is(module, progress.module)) return nullptr;
    if (place + 1 < order.size()) {
        __builtin_prefetch(order[place + 1].info.get());
        __builtin_prefetch(&order[place + 1].link);
    }
    ++progress.child;
    return order[place].info.get();
}

// A module's data has left the cache since its last call, so fetch it early.
INLINE void prefetch_next(const Progress& progress) {
    if (!progress.info || progress.child >= progress.info->order.size()) return;
    progress.info->order[progress.child].info->prefetch();
}

// Returns true if a model was destroyed or a module exchanged, so that its data can be freed.
COLD bool some_died(Watch* watch) {
    Owned dead(PyObject_GetAttr(watch->scopes, dead_name));
    if (!dead) PyErr_Clear();
    return !dead || !PyList_Check(dead.get()) || PyList_GET_SIZE(dead.get()) != 0;
}

}  // namespace

namespace {

// Returns a call's result, or raises if a routine or the call itself has raised.
COLD PyObject* settle_call(Watch* watch, PyObject* result) {
    if (result != nullptr && watch->pending != nullptr && PyList_GET_SIZE(watch->pending) != 0) {
        Owned raised(PyObject_CallNoArgs(watch->raise_pending));
        if (!raised) Py_CLEAR(result);
    }
    if (result == nullptr && watch->module_failed != nullptr) {
        // torch may have turned a routine's TypeError into "unsupported operand".
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        if (trace != nullptr) PyException_SetTraceback(value, trace);
        Owned failed = Owned::share(watch->module_failed);
        Owned answer(PyObject_CallOneArg(failed.get(), value));
        if (answer) {
            PyErr_Restore(type, value, trace);
        } else {
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(trace);
        }
    }
    return result;
}

}  // namespace

namespace {

// Runs a call in the scope around it where the driver failed to find its own.
COLD PyObject* skip_module(Watch* watch, PyObject* const* args, size_t count, PyObject* names) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Owned where(PyUnicode_FromFormat("calls of %s", Py_TYPE(args[0])->tp_name));
    PyErr_Restore(type, value, trace);
    if (!where || !is_skipped(watch, where.get())) return nullptr;
    return PyObject_Vectorcall(module_original, args, count, names);
}

}  // namespace

HOT PyObject* call_module(PyObject* function, PyObject* const* args, size_t count,
                          PyObject* names) {
    Thread* thread = current;
    if (thread == nullptr || thread->attachment == nullptr || thread->quiet) {
        if (ask == nullptr || !has_joined()) {
            return PyObject_Vectorcall(module_original, args, count, names);
        }
        thread = current;
    }
    Watch* watch = thread->watch;
    if (watch == nullptr || PyVectorcall_NARGS(count) == 0) {
        return in_python(function, args, count, names);
    }
    if (!watch->enabled(thread)) return PyObject_Vectorcall(module_original, args, count, names);
    if (!watch->refresh()) return nullptr;
    Py_ssize_t depth = PyList_GET_SIZE(thread->activations);
    if (thread->opaque || watch->watches_scopes ||
        (depth == 0 && (watch->watches_calls || thread->backward || some_died(watch)))) {
        return in_python(function, args, count, names);
    }
    Activation* parent = nullptr;
    ScopeInfo* info = nullptr;
    if (depth != 0) {
        parent = reinterpret_cast<Activation*>(PyList_GET_ITEM(thread->activations, depth - 1));
        info = next_child(parent, args[0]);
    }
    Owned watch_kept = Owned::share(reinterpret_cast<PyObject*>(watch));
    if (info == nullptr && (info = child_of(watch, parent, args[0])) == nullptr) {
        if (PyErr_Occurred()) return skip_module(watch, args, count, names);
        return PyObject_Vectorcall(module_original, args, count, names);
    }
    const void* caller = amanda_innermost_frame(thread->state);
    Activation* activation = new_activation(info->scope.get(), info, caller);
    if (activation == nullptr) return nullptr;
    activation->progress.module = args[0];
    Owned kept(reinterpret_cast<PyObject*>(activation));
    if (!enter(thread->activations, activation)) return nullptr;
    PyObject* result = PyObject_Vectorcall(module_original, args, count, names);
    activation->progress.module = nullptr;
    PyObject* list = thread->activations;
    leave(list, activation);
    // Unless `apply` ended meanwhile, the innermost activation is `parent` again.
    if (depth != 0 && PyList_GET_SIZE(list) == depth) {
        prefetch_next(reinterpret_cast<Activation*>(PyList_GET_ITEM(list, depth - 1))->progress);
    }
    bool ended = result != nullptr &&
                 (watch->pending == nullptr || PyList_GET_SIZE(watch->pending) == 0);
    return ended ? result : settle_call(watch, result);
}

namespace {

PyObject* hasten_module_call(PyObject*, PyObject* args) {
    PyObject *replacement, *original;
    if (!PyArg_ParseTuple(args, "O!O", &PyFunction_Type, &replacement, &original)) return nullptr;
    Py_XSETREF(module_original, Py_NewRef(original));
    set_call(replacement, call_module);
    Py_RETURN_NONE;
}

bool is_function_of(PyTypeObject* type, PyObject* name) {
    PyObject* held = PyDict_GetItemWithError(type->tp_dict, name);
    return held != nullptr && PyFunction_Check(held);
}

// Where one function takes the place of another, the slots of all subclasses stay as they are, so
// only what is cached of the type is forgotten. `setattr` would look the slot up in each subclass.
PyObject* replace_function(PyObject*, PyObject* args) {
    PyTypeObject* type;
    PyObject *name, *function;
    if (!PyArg_ParseTuple(args, "O!UO", &PyType_Type, &type, &name, &function)) return nullptr;
    bool same = (type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 && PyFunction_Check(function) &&
                Py_TYPE(type)->tp_setattro == PyType_Type.tp_setattro && is_function_of(type, name);
    if (PyErr_Occurred()) return nullptr;
    if (!same) {
        if (PyObject_SetAttr(reinterpret_cast<PyObject*>(type), name, function) < 0) return nullptr;
        Py_RETURN_NONE;
    }
    // The replaced function is freed after the caches have forgotten it.
    Owned held = Owned::share(PyDict_GetItemWithError(type->tp_dict, name));
    if (PyDict_SetItem(type->tp_dict, name, function) < 0) return nullptr;
    PyType_Modified(type);
    Py_RETURN_NONE;
}

// A sufficient condition, because it reads no code: the first argument of a `forward` is its module.
PyObject* runs_called_module(PyObject*, PyObject* kind) {
#if defined(AMANDA_ARGUMENTS_KNOWN)
    Thread* thread = current;
    Py_ssize_t depth = thread != nullptr ? PyList_GET_SIZE(thread->activations) : 0;
    PyObject* top = depth != 0 ? PyList_GET_ITEM(thread->activations, depth - 1) : Py_None;
    if (!is_activation(top) || !PyType_Check(kind)) Py_RETURN_FALSE;
    const Progress& progress = reinterpret_cast<Activation*>(top)->progress;
    if (progress.bound == nullptr || progress.module == nullptr) Py_RETURN_FALSE;
    for (AmandaFrame* frame = amanda_innermost_frame(thread->state); frame != progress.bound;
         frame = amanda_frame_back(frame)) {
        if (frame == nullptr) Py_RETURN_FALSE;
        PyObject* first = amanda_first_argument(frame);
        if (first != nullptr && first != progress.module &&
            PyType_IsSubtype(Py_TYPE(first), reinterpret_cast<PyTypeObject*>(kind))) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
#else
    (void)kind;
    Py_RETURN_FALSE;
#endif
}

PyMethodDef functions[] = {
    {"runs_called_module", runs_called_module, METH_O,
     "runs_called_module(kind, /)\n--\n\n"
     "Whether no method of a module runs inside the innermost call of one, except for its own.\n\n"
     "False also if that is not known; `kind` is the type of modules."},
    {"replace_function", replace_function, METH_VARARGS,
     "replace_function(type, name, function, /)\n--\n\n"
     "Do what setattr(type, name, function) does, sooner if a function is replaced."},
    {"hasten_module_call", hasten_module_call, METH_VARARGS,
     "hasten_module_call(replacement, original, /)\n--\n\n"
     "Execute the function that replaces nn.Module.__call__ in C where possible."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_modules(PyObject* module) {
    modules_name = PyUnicode_InternFromString(kModules);
    dead_name = PyUnicode_InternFromString("dead");
    return PyModule_AddFunctions(module, functions);
}

}  // namespace amanda
