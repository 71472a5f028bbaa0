// The way from an op's output to one of the nodes that the op made.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <vector>

#include "identity.h"

namespace amanda {

struct Route {
    std::vector<int> edges;    // which edge to follow, from the output's node on
    std::vector<Owned> kinds;  // types of the nodes on the way, both ends included
    long long number = 0;      // of the node among those that the op made

    // Reads (edges, kinds, number). False with an exception.
    bool read(PyObject* parts);
    // The node behind `output`, of an op that began when the next node would get number `start`.
    // Null without an exception where the way is another one.
    Owned follow(PyObject* output, uint64_t start) const;
};

int add_routes();

}  // namespace amanda
