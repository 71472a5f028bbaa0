// One hook in the place of those on all nodes of an op, until a backward pass reaches it.
#pragma once

#include "routes.h"

namespace amanda {

// What the executions of an op share until its nodes have been analysed.
struct Pending {
    long references = 0;
    Owned function;  // (start, number of the hook, node or None) -> what the hook does from now on, or None
    Route route;     // to the node of the output
    bool spent = false;  // whether nodes were hooked: they may have been analysed since

    // Reads (function, route). False with an exception.
    bool read(PyObject* parts);
};

// Hooks the node of `output`: 1, or 0 if it is not as it was, or -1 with an exception.
int hook_pending(const Shared<Pending>& pending, PyObject* output, uint64_t start);

int add_pending(PyObject* module);

}  // namespace amanda
