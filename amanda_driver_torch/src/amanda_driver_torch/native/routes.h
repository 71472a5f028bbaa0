// The path from an op's output to one of the nodes that the op made.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <vector>

#include "identity.h"

namespace amanda {

struct Route {
    std::vector<int> edges;    // the edge to follow at each node, from the output's node on
    std::vector<Owned> kinds;  // types of the nodes on the path, including both ends
    long long number = 0;      // of the node among those that the op made

    // Reads (edges, kinds, number). False with an exception.
    bool read(PyObject* parts);
    // Returns the node at the end of the path from `output`. `start` is the sequence number before
    // the op. Null without an exception if the path differs.
    Owned follow(PyObject* output, uint64_t start) const;
};

int add_routes();

}  // namespace amanda
