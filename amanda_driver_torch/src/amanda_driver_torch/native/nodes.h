// `NodePlans`: what is to be done at the backward nodes of one op, in the form in which C hooks them.
#pragma once

#include "gradients.h"

namespace amanda {

// Whether `object` is one that serves an execution which made so many nodes, in this epoch.
bool serves(PyObject* object, const Watch* watch, uint64_t made);
// Whether it is one of this epoch.
bool may_serve(PyObject* object, const Watch* watch);
// Hooks the nodes behind `output`: 1, or 0 if they are not as they were, or -1 with an exception.
int hook_nodes(PyObject* object, PyObject* output, uint64_t start);

int add_nodes(PyObject* module);

}  // namespace amanda
