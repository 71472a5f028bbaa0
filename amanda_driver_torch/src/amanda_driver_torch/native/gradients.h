// Routines for the gradients that arrive at an op's output, called without a Python frame around
// them. What a routine changes, and whatever else is particular, is handed over to Python.
#pragma once

#include "steps.h"

namespace amanda {

// The steps that a program and the hooks made for its executions share. A hook may not keep a
// routine alive: what its tool holds may lead back to the hooked node, through C++ nodes that the
// garbage collector cannot see.
struct GradientSteps {
    long references = 0;
    PyObject* program = nullptr;  // borrowed; null once it is gone, and the steps with it
    std::vector<ProgramStep> steps;
    Owned epoch;  // in which they hold
    Owned watch;

    void forget();
};

// Of one output: the hook serves all executions.
struct Arrival {
    Owned hook;
    Shared<GradientSteps> steps;
};

// An arrival out of (function, steps): `function(gradient, done)` does it all in Python, where
// `done` is what the first routines have returned. False with an exception.
bool read_arrival(PyObject* parts, PyObject* program, PyObject* epoch, PyObject* watch,
                  Arrival* arrival);

// Hooks the gradient that arrives at `tensor`. False with an exception.
bool hook_tensor(PyObject* tensor, PyObject* hook);

int add_gradients(PyObject* module);

}  // namespace amanda
