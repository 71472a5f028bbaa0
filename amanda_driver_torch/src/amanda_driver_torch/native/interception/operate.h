// The execution of one operator: one without a plan is handled in C alone, and all others are passed
// to a program or to the attachment in Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "programs/operator_call.h"

namespace amanda {

struct Thread;

// Executes one call of an operator by a watched thread.
PyObject* operate(Thread* thread, Definition* definition, Call& call);

}  // namespace amanda
