// torch's graphs, read and hooked without Python objects of their nodes and hooks.
//
// A hook that Python registers costs a handle, a dict and an object of the node, which take longer
// than the call of a routine. torch's headers are not needed for hooks of our own: they are objects
// with the virtual functions of torch's hooks, in the lists where torch keeps them. Where those are
// is found by experiment (`learn_graphs`). If a version of torch differs, Python's way is taken.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace amanda {

struct Node;  // torch's

// Gradients as torch passes them: pointers to tensors, each of which counts as a reference. A list
// must be given back to torch before it is destroyed.
using Gradients = std::vector<void*>;

// When torch calls a hook: with the gradient of one output, or before a node, or after it.
enum class When { OF_OUTPUT, BEFORE, AFTER };

// Have the virtual functions of torch's hooks, in this order. A call returns the gradients to use.
struct HookBefore {
    virtual ~HookBefore() = default;
    virtual Gradients operator()(const Gradients& gradients) = 0;
    virtual void compiled_args(void* args) const = 0;  // gives the hook to compiled autograd
};
struct HookAfter {
    virtual ~HookAfter() = default;
    virtual Gradients operator()(const Gradients& results, const Gradients& gradients) = 0;
    virtual void compiled_args(void* args) const = 0;
};

// Returns true if the functions below may be called.
bool can_read_graphs();

// Returns the place of torch's tensor in a plain tensor or a parameter; null for other values, or if
// it is not known.
void* const* tensor_in(PyObject* value);
// Returns the node that made a plain tensor; null if there is none, or for other values.
Node* node_of(PyObject* value);
// Returns which of the node's outputs a tensor is.
size_t number_of(PyObject* tensor);
// Returns what only nodes of the same class in C++ have.
const void* class_of(const Node* node);
// Returns true if nodes of this Python type have a class of their own in C++.
bool has_own_class(PyTypeObject* type);
uint64_t sequence_number_of(const Node* node);
// Returns the node to which a node's result goes; null if there is none.
Node* following(const Node* node, size_t result);

// Returns true if a node accumulates the gradient of `leaf`; false, too, if it is not known.
bool accumulates(const Node* node, PyObject* leaf);
// Returns the node of a Python object of one; null if it is not known.
Node* node_in(PyObject* object);

// Returns true if a node may be hooked: no hook of Python's is there. Otherwise Python has to hook
// it, so that hooks are called in the order of registration.
bool can_hook(const Node* node, When when);
// Hooks a node, which then owns the hook.
void add_hook(Node* node, When when, HookBefore* hook);
void add_hook(Node* node, HookAfter* hook);
// Returns the hooks of a node: ours, torch's, and those of other libraries.
const std::vector<void*>& hooks_of(const Node* node, When when);
// Returns true if a hook is one of torch's in Python.
bool is_pythons(const void* hook, When when);
// Removes the hooks before or after a node of which `is_over` returns true, and torch's in Python
// from which all functions were removed. Must not be called while the node calls its hooks.
void remove_hooks(Node* node, When when, const std::function<bool(const void*)>& is_over);

// Let torch call a Python function as a hook. torch's exceptions pass.
Gradients call_as_hook(When when, PyObject* function, const Gradients& gradients, size_t number);
Gradients call_as_hook(PyObject* function, const Gradients& results, const Gradients& gradients);
void compile_as_hook(When when, PyObject* function, size_t number, void* args);

int add_graphs(PyObject* module);

}  // namespace amanda
