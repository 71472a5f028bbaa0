// One hook instead of hooks on all nodes of an op, until a backward pass reaches it.
#pragma once

#include "gradients/routes.h"

namespace amanda {

// State shared by the executions of an op until its nodes have been analysed.
struct Pending {
    long references = 0;
    Owned function;  // (start, number of the hook, node or None) -> its new function, or None
    Route route;     // to the node of the output
    bool spent = false;  // whether nodes were hooked, so that they may have been analysed

    // Reads (function, route). False with an exception.
    bool read(PyObject* parts);
};

// Hooks the node of `output`: 1, or 0 if it differs from last time, or -1 with an exception.
int hook_pending(const Shared<Pending>& pending, PyObject* output, uint64_t start);

int add_pending(PyObject* module);

}  // namespace amanda
