// Registers hooks on gradients: in torch's graphs, or by Python where a graph cannot be read.
#pragma once

#include "gradients/gradients.h"

namespace amanda {

// Hooks the gradient that arrives at `tensor`. False with an exception.
bool hook_tensor(PyObject* tensor, const SharedHook& hook);
// Hooks the node that made `output`, before it. False with an exception.
bool hook_node_of(PyObject* output, const SharedHook& hook);
// Returns true if a node may be hooked without Python objects of it, else Python has to.
bool can_hook_in_graph(const Node* node, Seen seen);
// Hooks it. `number`: of the output, if the hook is for the gradient of one.
void hook_in_graph(Node* node, const SharedHook& hook, Seen seen, size_t number = 0);
// Hooks the accumulation into a leaf without Python objects, unless it has these hooks already.
// False if Python has to.
bool can_hook_leaf(const Node* node);
void hook_leaf(Node* node, const std::vector<Hooking>& hooks);
// Hooks a node, before or after it. False with an exception.
bool hook_node(PyObject* node, PyObject* hook, Seen seen);
// Hooks a node before it; returns the number of the hook in the order of Python's. Null with an
// exception.
Owned hook_before(PyObject* node, PyObject* hook);

int add_hooking(PyObject* module);

}  // namespace amanda
