// `NodePlans`: the plans of the backward nodes of one op, in the form by which C hooks them.
#pragma once

#include "gradients.h"

namespace amanda {

// Returns true if `object` is one for executions that make so many nodes, in this epoch.
bool serves(PyObject* object, const Watch* watch, uint64_t made);
// Returns true if it is one of this epoch.
bool may_serve(PyObject* object, const Watch* watch);
// Returns true if it hooks nodes when the op runs, not when the first of them does.
bool hooks_at_once(PyObject* object);
// Hooks the nodes of `output`: 1, or 0 if they differ from last time, or -1 with an exception.
int hook_nodes(PyObject* object, PyObject* output, uint64_t start);
// Notes that nodes have been analysed since, so that it serves no more executions.
void outdate(PyObject* object);

int add_nodes(PyObject* module);

}  // namespace amanda
