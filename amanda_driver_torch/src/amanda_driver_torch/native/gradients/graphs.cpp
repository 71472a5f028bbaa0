// Where torch keeps what `graphs.h` reads.
#include "gradients/graphs.h"

#include <cstring>
#include <typeinfo>

#include "memory_map.h"
#include "owned.h"
#include "torch_symbols.h"

namespace amanda {

namespace {

using Word = uintptr_t;
constexpr size_t WORD = sizeof(Word);
// The sizes of a tensor's Python object and of a node, in words, up to which they are searched.
constexpr size_t TENSOR = 6, NODE = 48;
constexpr size_t UNKNOWN = size_t(-1);
constexpr size_t KINDS = 3;

// In words from the start of an object.
struct Layout {
    size_t tensor = UNKNOWN;  // in a Python tensor: of torch's
    size_t number = UNKNOWN;  // in a node: of its sequence number
    size_t edges = UNKNOWN;   // in a node: of the list of edges
    size_t edge = UNKNOWN;    // the size of an edge, whose first word is the node
    size_t node = UNKNOWN;    // in a Python object of a node: of torch's
    size_t leaf = UNKNOWN;    // in a node that accumulates a gradient: of the leaf
    size_t hooks[KINDS] = {UNKNOWN, UNKNOWN, UNKNOWN};  // in a node: of the list of hooks
    const void* tables[KINDS] = {};  // the virtual functions of torch's hooks in Python
};
Layout layout;
bool is_known = false, is_learning = false;
PyTypeObject *tensor_type = nullptr, *parameter_type = nullptr, *function_type = nullptr;

// torch's hooks in Python.
struct PythonHook {
    const void* table;
    PyObject* dict;
    size_t number;  // OF_OUTPUT: of the output
};

// A list in C++.
struct List {
    Word begin, end, room;
};

const Word& word(const void* object, size_t number) {
    return static_cast<const Word*>(object)[number];
}

List& list_at(const void* node, size_t number) {
    return *reinterpret_cast<List*>(const_cast<Word*>(&word(node, number)));
}

// Returns how many words from the start of a node, at most `most`, are on pages that can be read. torch
// does not say how large a node is; a test asserts that `NODE` words belong to it.
size_t readable(const Node* node, size_t most = NODE) {
    while (most > 0 && !is_writable_page(&word(node, most - 1))) --most;
    return most;
}

// The place of the pointer to torch's tensor.
void* const& place_in(PyObject* tensor) {
    return *reinterpret_cast<void* const*>(&word(tensor, layout.tensor));
}

// The virtual functions come in this order: two destructors, the call, `compiled_args`.
void* const* functions(When when) {
    return static_cast<void* const*>(layout.tables[size_t(when)]);
}

// Python's hooks for one function.
class AsHook {
  public:
    AsHook(When when, PyObject* function, size_t number) : dict_(PyDict_New()) {
        // Without it, torch would raise Python's error, as it does if the function fails.
        if (dict_ && PyDict_SetItem(dict_.get(), function, function) < 0) PyErr_Clear();
        hook_ = {layout.tables[size_t(when)], dict_.get(), number};
    }
    const PythonHook* get() const { return &hook_; }

  private:
    Owned dict_;
    PythonHook hook_;
};

}  // namespace

bool can_read_graphs() { return is_known; }

void* const* tensor_in(PyObject* value) {
    bool is_plain = Py_TYPE(value) == tensor_type || Py_TYPE(value) == parameter_type;
    return is_known && is_plain ? &place_in(value) : nullptr;
}

Node* node_of(PyObject* value) {
    if (Py_TYPE(value) != tensor_type) return nullptr;
    return static_cast<Node*>(node_that_made(place_in(value)));
}

size_t number_of(PyObject* tensor) { return size_t(number_of_output(place_in(tensor))); }

const void* class_of(const Node* node) { return reinterpret_cast<const void*>(word(node, 0)); }

bool has_own_class(PyTypeObject* type) { return !PyType_IsSubtype(type, function_type); }

uint64_t sequence_number_of(const Node* node) { return word(node, layout.number); }

Node* following(const Node* node, size_t result) {
    const List& edges = list_at(node, layout.edges);
    Word at = edges.begin + result * layout.edge * WORD;
    return at < edges.end ? *reinterpret_cast<Node* const*>(at) : nullptr;
}

const std::vector<void*>& hooks_of(const Node* node, When when) {
    return reinterpret_cast<const std::vector<void*>&>(list_at(node, layout.hooks[size_t(when)]));
}

bool is_pythons(const void* hook, When when) {
    return reinterpret_cast<const void*>(word(hook, 0)) == layout.tables[size_t(when)];
}

bool accumulates(const Node* node, PyObject* leaf) {
    void* const* tensor = tensor_in(leaf);
    return tensor != nullptr && layout.leaf != UNKNOWN &&
           word(node, layout.leaf) == reinterpret_cast<Word>(*tensor);
}

Node* node_in(PyObject* object) {
    // A node of Python's functions is another kind of object.
    if (!is_known || layout.node == UNKNOWN || !has_own_class(Py_TYPE(object))) return nullptr;
    return reinterpret_cast<Node*>(word(object, layout.node));
}

bool can_hook(const Node* node, When when) {
    const auto& hooks = hooks_of(node, when);
    return hooks.empty() || !is_pythons(hooks.back(), when);
}

namespace {

std::vector<void*>& list_of(Node* node, When when) {
    return const_cast<std::vector<void*>&>(hooks_of(node, when));
}

}  // namespace

void add_hook(Node* node, When when, HookBefore* hook) { list_of(node, when).push_back(hook); }

void add_hook(Node* node, HookAfter* hook) { list_of(node, When::AFTER).push_back(hook); }

void remove_hooks(Node* node, When when, const std::function<bool(const void*)>& is_over) {
    auto& hooks = list_of(node, when);
    for (size_t at = 0; at < hooks.size();) {
        void* hook = hooks[at];
        bool is_empty = is_pythons(hook, when) &&
                        PyDict_Size(static_cast<const PythonHook*>(hook)->dict) == 0;
        if (!is_empty && !is_over(hook)) {
            ++at;
            continue;
        }
        hooks.erase(hooks.begin() + std::ptrdiff_t(at));
        if (when == When::AFTER) {
            delete static_cast<HookAfter*>(hook);
        } else {
            delete static_cast<HookBefore*>(hook);
        }
    }
}

Gradients call_as_hook(When when, PyObject* function, const Gradients& gradients, size_t number) {
    using Call = Gradients (*)(const void*, const Gradients&);
    AsHook hook(when, function, number);
    return reinterpret_cast<Call>(functions(when)[2])(hook.get(), gradients);
}

Gradients call_as_hook(PyObject* function, const Gradients& results, const Gradients& gradients) {
    using Call = Gradients (*)(const void*, const Gradients&, const Gradients&);
    AsHook hook(When::AFTER, function, 0);
    return reinterpret_cast<Call>(functions(When::AFTER)[2])(hook.get(), results, gradients);
}

void compile_as_hook(When when, PyObject* function, size_t number, void* args) {
    using Compile = void (*)(const void*, void*);
    AsHook hook(when, function, number);
    reinterpret_cast<Compile>(functions(when)[3])(hook.get(), args);
}

namespace {

PyObject* noted = nullptr;  // the arguments of the last call of `note`

PyObject* note(PyObject*, PyObject* args) {
    Py_XSETREF(noted, Py_NewRef(args));
    Py_RETURN_NONE;
}

PyMethodDef note_method = {"note", note, METH_VARARGS, nullptr};

// Finds torch's tensor in a Python tensor.
bool find_tensor(PyObject* const* tensors, size_t count) {
    if (is_hidden("tensor")) return false;
    for (size_t at = 2; at < TENSOR; ++at) {
        bool found = true;
        for (size_t i = 0; found && i < count; ++i) {
            Owned address(PyObject_GetAttrString(tensors[i], kAddress));
            found = address && word(tensors[i], at) == Word(PyLong_AsVoidPtr(address.get()));
        }
        if (PyErr_Occurred()) return false;
        if (found) {
            layout.tensor = at;
            return true;
        }
    }
    return false;
}

bool find_number(PyObject* const* tensors, size_t count) {
    if (is_hidden("number")) return false;
    size_t end = NODE;
    for (size_t i = 0; i < count; ++i) end = readable(node_of(tensors[i]), end);
    for (size_t at = 1; at < end; ++at) {
        bool found = true;
        for (size_t i = 0; found && i < count; ++i) {
            Owned node(PyObject_GetAttrString(tensors[i], "grad_fn"));
            Owned number(node ? PyObject_CallMethod(node.get(), kSequenceNumber, nullptr) : nullptr);
            found = number && word(node_of(tensors[i]), at) ==
                                  PyLong_AsUnsignedLongLong(number.get());
        }
        if (PyErr_Occurred()) return false;
        if (found) {
            layout.number = at;
            return true;
        }
    }
    return false;
}

// Finds the edges of a node to two others.
bool find_edges(Node* node, Node* one, Node* two) {
    if (is_hidden("edges")) return false;
    for (size_t at = 1, end = readable(node); at + 2 < end; ++at) {
        const List& edges = list_at(node, at);
        Word size = edges.end - edges.begin;
        if (edges.end <= edges.begin || edges.room < edges.end || size > 8 * WORD ||
            size % (2 * WORD) != 0) {
            continue;
        }
        layout.edges = at;
        layout.edge = size / 2 / WORD;
        if (following(node, 0) == one && following(node, 1) == two) return true;
    }
    return false;
}

// Finds a node in its Python object, and the leaf in the node after it. Does without if they are not
// found.
void find_leaf(PyObject* object, Node* node, PyObject* leaf) {
    for (size_t at = 2; !is_hidden("node") && at < TENSOR && layout.node == UNKNOWN; ++at) {
        if (word(object, at) == reinterpret_cast<Word>(node)) layout.node = at;
    }
    Node* last = following(node, 0);
    size_t end = last != nullptr && !is_hidden("leaf") ? readable(last, 2 * NODE) : 0;
    for (size_t at = 1; at < end && layout.leaf == UNKNOWN; ++at) {
        if (word(last, at) == reinterpret_cast<Word>(place_in(leaf))) layout.leaf = at;
    }
}

// Finds the list of hooks to which one is added by calling `method` of `object`.
bool find_hooks(Node* node, When when, PyObject* object, const char* method, const char* name) {
    if (is_hidden(name)) return false;
    Word before[NODE];
    size_t end = readable(node);
    std::memcpy(before, node, end * WORD);
    Owned hook(PyCFunction_New(&note_method, nullptr));
    if (!hook || !Owned(PyObject_CallMethod(object, method, "O", hook.get()))) return false;
    for (size_t at = 1; at + 2 < end; ++at) {
        const List& hooks = list_at(node, at);
        if (before[at] != 0 || before[at + 1] != 0 || before[at + 2] != 0 || hooks.begin == 0 ||
            hooks.end != hooks.begin + WORD || hooks.room < hooks.end) {
            continue;
        }
        const auto& found = **reinterpret_cast<PythonHook* const*>(hooks.begin);
        const auto* type = static_cast<const std::type_info* const*>(found.table)[-1];
        if (std::strcmp(type->name(), name) != 0 || !PyDict_Check(found.dict) ||
            PyDict_Size(found.dict) != 1 || (when == When::OF_OUTPUT && found.number != 0)) {
            return false;
        }
        layout.hooks[size_t(when)] = at;
        layout.tables[size_t(when)] = found.table;
        return true;
    }
    return false;
}

// Returns true if torch calls a function with what it was given, and changes nothing.
bool calls(When when) {
    if (is_hidden("call")) return false;
    Owned hook(PyCFunction_New(&note_method, nullptr));
    Py_CLEAR(noted);
    // No other tensor may be in a list that is destroyed here.
    Gradients given(1, undefined_tensor());
    Gradients results = when == When::AFTER ? call_as_hook(hook.get(), given, given)
                                            : call_as_hook(when, hook.get(), given, 0);
    if (results != given || noted == nullptr ||
        PyTuple_GET_SIZE(noted) != (when == When::AFTER ? 2 : 1)) {
        return false;
    }
    PyObject* first = PyTuple_GET_ITEM(noted, 0);
    if (when == When::OF_OUTPUT) return first == Py_None;
    return PyTuple_Check(first) && PyTuple_GET_SIZE(first) == 1 &&
           PyTuple_GET_ITEM(first, 0) == Py_None;
}

// (type of parameters, type of Python's functions, a leaf, what is computed from it alone, another
// tensor, the product of the two): finds the layout with nodes that nobody uses.
PyObject* learn_graphs(PyObject*, PyObject* args) {
    PyObject *parameters, *functions, *leaf, *tensors[3];
    if (!PyArg_ParseTuple(args, "O!O!OOOO", &PyType_Type, &parameters, &PyType_Type, &functions,
                          &leaf, &tensors[0], &tensors[1],
                          &tensors[2])) {
        return nullptr;
    }
    if (is_known || is_learning) return PyBool_FromLong(is_known);
    is_learning = true;  // Another thread may run meanwhile.
    layout = Layout();
    Py_XSETREF(tensor_type, reinterpret_cast<PyTypeObject*>(Py_NewRef(Py_TYPE(tensors[0]))));
    Py_XSETREF(parameter_type, reinterpret_cast<PyTypeObject*>(Py_NewRef(parameters)));
    Py_XSETREF(function_type, reinterpret_cast<PyTypeObject*>(Py_NewRef(functions)));
    bool found = can_read_tensors() && find_tensor(tensors, 3);
    Node* nodes[3] = {};
    for (size_t i = 0; found && i < 3; ++i) found = (nodes[i] = node_of(tensors[i])) != nullptr;
    found = found && find_number(tensors, 3) && find_edges(nodes[2], nodes[0], nodes[1]);
    Owned node(found ? PyObject_GetAttrString(tensors[2], "grad_fn") : nullptr);
    found = node &&
            find_hooks(nodes[2], When::OF_OUTPUT, tensors[2], "register_hook", kTensorPreHook) &&
            find_hooks(nodes[2], When::BEFORE, node.get(), "register_prehook", kPreHook) &&
            find_hooks(nodes[2], When::AFTER, node.get(), "register_hook", kPostHook) &&
            calls(When::OF_OUTPUT) && calls(When::BEFORE) && calls(When::AFTER);
    Owned first(found ? PyObject_GetAttrString(tensors[0], "grad_fn") : nullptr);
    if (first) find_leaf(first.get(), nodes[0], leaf);
    Py_CLEAR(noted);
    is_learning = false;
    // An attribute that torch does not have tells as much as a layout that is not found.
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    if (PyErr_Occurred()) return nullptr;
    is_known = found;
    return PyBool_FromLong(found);
}

PyObject* knows_graphs(PyObject*, PyObject*) { return PyBool_FromLong(is_known); }

PyObject* forget_graphs(PyObject*, PyObject*) {
    is_known = false;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"forget_graphs", forget_graphs, METH_NOARGS,
     "forget_graphs()\n--\n\n"
     "Let Python register hooks until it is found out again how torch keeps graphs."},
    {"knows_graphs", knows_graphs, METH_NOARGS,
     "knows_graphs()\n--\n\nReturn whether it is known how torch keeps graphs."},
    {"learn_graphs", learn_graphs, METH_VARARGS,
     "learn_graphs(parameter_type, function_type, leaf, one, two, product, /)\n--\n\n"
     "Find out how torch keeps graphs, by a leaf, two tensors that are computed, the first one from "
     "the leaf, and their product; return whether that is known now."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_graphs(PyObject* module) { return PyModule_AddFunctions(module, methods); }

}  // namespace amanda
