// Routines for gradients, called without a Python frame. Python handles changes made by routines,
// and all other special cases.
#pragma once

#include <memory>

#include "graphs.h"
#include "routes.h"
#include "steps.h"

namespace amanda {

// The arguments of a hook, and the values that its routines get.
enum class Seen {
    ARRIVING,  // (gradient of a tensor): the gradient, at the position of the op's output
    TOGETHER,  // (gradients before a node): those of the op's outputs
    BEFORE,    // (gradients before a node): all of them
    AFTER,     // (results of a node, gradients before it): the results
    GIVEN,     // like AFTER: the gradients of an op's inputs, made of the results
};

// The steps of a plan, shared with the hooks of its executions. A hook must not keep a routine
// alive: its tool may hold tensors that lead back to the hooked node through C++ nodes, which the
// garbage collector cannot follow.
struct GradientSteps {
    // How to make the gradient of an input from a node's result.
    enum class Change { NONE, RESHAPE, TRANSPOSE };
    struct Way {
        int position;
        int item;  // in a list; -1 if it is the input itself
        int index;
        Change change;
        bool is_read;  // by any step
    };

    long references = 0;
    Seen seen = Seen::ARRIVING;
    PyObject* owner = nullptr;  // borrowed; null once it is destroyed together with the steps
    // BEFORE, AFTER: whether the node is not analysed yet, so that Python does everything.
    bool analyses = false;
    std::vector<ProgramStep> steps;
    Owned epoch;  // in which they are valid
    Owned watch;
    // GIVEN: the number of inputs, and how to make some of their gradients. ARRIVING, TOGETHER: the
    // number of outputs, and which of the gradients is of which.
    int count = 0;
    std::vector<Way> ways;
    bool computes = false;  // whether any of `ways` changes a result
    std::vector<std::pair<int, Py_ssize_t>> lengths;  // of the inputs that are lists
    // BEFORE, AFTER: the context's data of an execution, and its op.
    Owned execution, op;
    // BEFORE, AFTER at the accumulation into a leaf: a list that is empty once the session has
    // ended, since the node may live on.
    Owned life;

    bool is_over() const { return life && PyList_GET_SIZE(life.get()) == 0; }
    void forget();
    // Returns true if any of `ways` needs the shape of its input.
    bool reshapes() const;
    int traverse(visitproc visit, void* arg) const;
};

// A hook that graphs share. They may be destroyed without the GIL, which only the last one needs.
using SharedHook = std::shared_ptr<PyObject>;
SharedHook share_hook(Owned hook);  // null for null

// One hook per execution, or one for all.
struct Hooking {
    Owned function;  // does everything in Python; also accepts the results of the first routines
    SharedHook hook;      // null if each execution needs its own, since gradients are reshaped
    Shared<GradientSteps> steps;
    Route route;      // GIVEN: to the node
    int place = 0;    // BEFORE, AFTER: of the node in the route of its op

    // Reads (function, steps, count, ways) for ARRIVING, or TOGETHER if there are several ways;
    // (function, steps, route, count, ways, lengths) for GIVEN; (function, steps, place, execution,
    // op) for BEFORE and AFTER, with None for the execution of a node that is not analysed yet. False
    // with an exception.
    bool read(Seen seen, PyObject* parts, PyObject* owner, PyObject* epoch, PyObject* watch);
    // The hook of one execution, which holds `own`. GIVEN: for each of `ways` the shape of the
    // input, or None if its gradient is not reshaped.
    Owned make(PyObject* own) const;
};

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

int add_gradients(PyObject* module);

}  // namespace amanda
