// The paths from an op's outputs to some of the nodes that the op made.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <vector>

#include "gradients/graphs.h"
#include "identity/identity.h"

namespace amanda {

struct Route {
    // A node on a path.
    struct Place {
        int before;  // the place before it; -1 for the node of an output
        int edge;    // to follow from there, or the number of the output
        Owned kind;  // its type
        long long number;  // among the nodes that the op made; -1 if it is not compared
        // Of its type's nodes; null if it is not known, or common to several types.
        mutable const void* node_class = nullptr;
    };
    static constexpr size_t MOST = 64;
    std::vector<Place> places;  // each one after the place before it

    // Reads a list of places. False with an exception.
    bool read(PyObject* list);
    // Finds the nodes at all places. `returned` is what the op returned, and `start` the sequence
    // number before it. False if a node differs, perhaps with an exception.
    bool follow(PyObject* returned, uint64_t start, std::vector<Owned>* nodes) const;
    // Finds up to `MOST` without Python objects; they live as long as what the op returned. False, without
    // an exception, if a node differs, or Python has to find them.
    bool find(PyObject* returned, uint64_t start, Node* (&nodes)[MOST]) const;

  private:
    // Notes the classes of the nodes that were found.
    void learn(PyObject* returned) const;
};

int add_routes();

}  // namespace amanda
