// The steps of a plan as C calls them: one routine after the other, none of which changes anything
// in most executions.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "identity.h"

namespace amanda {

struct Thread;
struct Watch;

struct ProgramStep {
    Owned routine, names;       // names: of keyword arguments, a tuple or null
    std::vector<Owned> values;  // of keyword arguments
    std::vector<int> positions;
    bool all = false;  // all positions, however many there are
    Owned step;        // `amanda_core.plan.Step`, for messages

    // Whether there are values at all its positions.
    bool reaches(PyObject* list) const;
    // Whether it is to be called with nothing but None.
    bool finds_only_none(PyObject* list) const;
};

// Programs are made of calls with as many operands at most; values of a routine may be more.
constexpr size_t MOST_OPERANDS = 24;

// Steps out of a list of (routine, kwargs, positions or None, step). False with an exception.
bool read_steps(PyObject* list, std::vector<ProgramStep>* steps);
int visit_steps(const std::vector<ProgramStep>& steps, visitproc visit, void* arg);

// Calls a routine with what it selects of `values`, marked as one and, where they are on, without
// gradients. Null with an exception, which names tool, routine and op.
Owned call_step(const ProgramStep& step, PyObject* values, Thread* thread, Watch* watch,
                bool gradients);

// Results of routines so far: None for each that changed nothing, and the one that did something.
Owned results(size_t before, PyObject* last);

}  // namespace amanda
