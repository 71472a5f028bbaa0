// Routines for gradients, called without a Python frame around them. What a routine changes, and
// whatever else is particular, is handed over to Python.
#pragma once

#include "routes.h"
#include "steps.h"

namespace amanda {

// What a hook is called with, and what its routines see of that.
enum class Seen {
    ARRIVING,  // (gradient of a tensor): that
    BEFORE,    // (gradients before a node): all of them
    AFTER,     // (results of a node, gradients before it): the results
    GIVEN,     // the same: the gradients of an op's inputs, made of some results
};

// The steps that a plan and the hooks made for its executions share. A hook may not keep a routine
// alive: what its tool holds may lead back to the hooked node, through C++ nodes that the garbage
// collector cannot see.
struct GradientSteps {
    // How a result of a node becomes the gradient of an input.
    enum class Change { NONE, RESHAPE, TRANSPOSE };
    struct Way {
        int position, index;
        Change change;
    };

    long references = 0;
    Seen seen = Seen::ARRIVING;
    PyObject* owner = nullptr;  // borrowed; null once it is gone, and the steps with it
    std::vector<ProgramStep> steps;
    Owned epoch;  // in which they hold
    Owned watch;
    // GIVEN: how many inputs there are, and what is known of some.
    int count = 0;
    std::vector<Way> ways;
    // BEFORE, AFTER: what the context has of an execution, and its op.
    Owned execution, op;

    void forget();
    int traverse(visitproc visit, void* arg) const;
};

// One hook for each execution, or one for all.
struct Hooking {
    Owned function;  // does it all in Python; also takes what the first routines have returned
    Owned hook;      // null where each execution needs one of its own
    Shared<GradientSteps> steps;
    Route route;  // to the node; empty for ARRIVING

    // Reads (function, steps), for ARRIVING; then also the route and (count, ways), for GIVEN, or
    // (execution, op). False with an exception.
    bool read(Seen seen, PyObject* parts, PyObject* owner, PyObject* epoch, PyObject* watch);
    // GIVEN: the hook of one execution; `shapes` of the inputs, as `ways` has them.
    Owned make(PyObject* shapes) const;
};

// Hooks the gradient that arrives at `tensor`. False with an exception.
bool hook_tensor(PyObject* tensor, PyObject* hook);
// Hooks a node, before or after it. False with an exception.
bool hook_node(PyObject* node, PyObject* hook, Seen seen);

int add_gradients(PyObject* module);

}  // namespace amanda
