// `NodePlans`: the plans of the backward nodes of one op, in the form by which C hooks them.
#pragma once

#include "gradients/gradients.h"

namespace amanda {

// Hooks the nodes that an op has just made, by the plans of its record: 1, or 0 if Python has to do
// so, or -1 with an exception. Must not be called while the user's modes would see it.
int hook_record(const Watch* watch, PyObject* record, PyObject* returned, uint64_t start);
// Returns true if that may be possible.
bool may_hook(const Watch* watch, PyObject* record);
// Returns true if so and no routine of these nodes may read the context.
bool may_hook_notes(const Watch* watch, PyObject* record);
// Returns true if nodes may be hooked only when the first of them runs.
bool hooks_later(const Watch* watch, PyObject* record);

// Notes that nodes have been analysed since, so that it serves no more executions.
void outdate(PyObject* object);

int add_nodes(PyObject* module);

}  // namespace amanda
