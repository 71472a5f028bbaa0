// `Program`: the plan of one op, in the form that C executes.
//
// It covers insertions before and after the forward op that change nothing in most executions:
// counting, tracing, statistics. After a change by a routine, and in other special cases, Python
// continues where the program stopped.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "identity/identity.h"

namespace amanda {

struct Thread;
struct Definition;
struct Watch;
class Call;

struct Program {
    PyObject_HEAD
    struct ProgramParts* parts;
};

bool is_program(PyObject* object);

// Returns true if the program of a record fits this call.
bool fits(const Program* program, const Watch* watch, PyObject* record, const Call& call,
          bool gradients);

// Executes a call by a program that fits.
PyObject* run_program(Program* program, PyObject* record, Thread* thread, Watch* watch,
                      Definition* definition, Call& call, bool gradients);

int add_program(PyObject* module);

}  // namespace amanda
