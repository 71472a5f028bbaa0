// The steps of a plan in the form that C calls: one routine after the other, which change nothing
// in most executions.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "kept_result.h"
#include "owned.h"

namespace amanda {

struct Thread;
struct Watch;

struct ProgramStep {
    Owned routine, names;       // names: of keyword arguments, a tuple or null
    std::vector<Owned> values;  // of keyword arguments
    std::vector<int> positions;
    bool all = false;  // all positions
    Owned step;        // `amanda_core.engine.plan.Step`, for messages
    Owned stamp;       // of a memoized routine, a list; else null
    Owned fresh;       // what computes its result without looking it up; or null
    KeptResult kept;
    bool is_note = false;  // whether it needs no context and changes nothing
    bool edits = true;     // whether it may return new values
    mutable bool accepted = false;  // whether Python has accepted and noted an edit of its

    // Returns true if all its positions have values.
    bool reaches(PyObject* list) const;
    // Returns true if all its values would be None.
    bool finds_only_none(PyObject* list) const;
};

// The type of a recorder's routines, which read no context and change nothing.
extern PyTypeObject* note_type;

// Returns what records the same mark as the routine of a step, without Python; null, without an
// exception, for other routines. A new reference.
extern PyObject* (*mark_of)(PyObject* routine, PyObject* step);

// The maximum number of operands of a program's call; a routine may get more values.
constexpr size_t MOST_OPERANDS = 24;

// Reads a sequence of steps of a plan. False with an exception.
bool read_steps(PyObject* given, std::vector<ProgramStep>* steps);
// Returns true if all are notes.
bool are_notes(const std::vector<ProgramStep>& steps);
int visit_steps(const std::vector<ProgramStep>& steps, visitproc visit, void* arg);

// Calls a routine with its selection of `values`, marked as a routine and without recording
// gradients. If these are recorded, a result is computed and not looked up, as weights are mostly
// written before they are read again. Null with an exception, which names tool, routine and op.
Owned call_step(const ProgramStep& step, PyObject* values, Thread* thread, Watch* watch,
                bool gradients);

// Whether several threads may run routines of one tool, which then hold its lock.
void set_sharing(bool value);

// The results of routines so far: None for those that changed nothing, and the last one.
Owned results(size_t before, PyObject* last);

}  // namespace amanda
