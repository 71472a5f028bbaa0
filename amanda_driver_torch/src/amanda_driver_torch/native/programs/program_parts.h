// The parts of a program.
#pragma once

#include <utility>
#include <vector>

#include "gradients/gradients.h"
#include "programs/program.h"

namespace amanda {

// The place of a tensor among the arguments of a call.
struct At {
    int argument;
    int item;  // in a list; -1 if it is the argument itself
};

struct ProgramParts {
    ~ProgramParts();

    // Returns true if the gradients of the op as a whole need hooks.
    bool hooks_gradients() const {
        return !(taps.empty() && arrivals.empty() && gradient_nodes.empty());
    }

    Owned epoch;
    std::vector<PyTypeObject*> types;  // of the arguments; held by `kinds`
    std::vector<Owned> kinds;
    std::vector<Owned> keywords;
    // Position of the signature -> number of the argument, or -1 for the default.
    std::vector<int> sources;
    std::vector<Owned> defaults;
    int spread = -1;  // the position that takes all positional arguments from its source on
    // Arguments that are not positions, by number, with the only values that the program fits.
    std::vector<std::pair<int, Owned>> fixed;
    std::vector<ProgramStep> before, after;
    long outputs = 1;     // number of outputs for which the op was analysed
    Owned execution;      // the context's data of one execution
    Owned context;
    long nodes = -1;      // number of nodes that the op makes, if they need no hooks; else -1
    // Gradients of inputs: identities that pass them to a function together.
    struct Tap {
        Owned function;
        std::vector<At> arguments;
    };
    std::vector<Tap> taps;
    std::vector<Hooking> arrivals;  // gradients of outputs, in the order of their hooks
    // Whether gradients of outputs are requested; and by output, whether the op makes a node of it.
    bool arrives = false;
    std::vector<bool> made_outputs;
    // Gradients of inputs at the nodes that compute them, instead of identities.
    bool meets = false;
    std::vector<Hooking> gradient_nodes;
    std::vector<std::vector<At>> shaped;  // per node: the arguments whose shapes it needs
    std::vector<std::pair<int, Py_ssize_t>> lengths;  // of the arguments that are lists
    long long made = 0;                    // number of nodes of an execution without identities
    // By argument, what the nodes depend on: number of dimensions, whether contiguous, and where they
    // permute dimensions, which ones are of size one, as bits (else -1).
    struct Laid {
        At at;
        int dimensions;
        bool contiguous;
        int ones;
        Owned dtype;
        mutable int32_t type = -1;  // torch's number of the dtype, once it is known
    };
    std::vector<Laid> laid;
    Owned autocast;  // () -> whether autocast is active; None if the nodes do not depend on it
    bool needs_context = true;   // whether routines may read it
    bool remembers = true;       // whether the context may remember an earlier execution
    bool with_gradients = true;  // whether it also fits calls with gradients
    // (True) -> the program's hooks on what is saved for backward, where none may be active; or null.
    Owned saved_hooks;
    Owned writes;                // positions that the op writes; null if it writes none
    bool aliases = false;        // whether the op's outputs may be its inputs, or views of them
    bool assigns = false;        // whether it is `x[i] = v`, which returns nothing
    std::vector<int> outs;       // the arguments that are destinations (`out=`)
    bool in_place = false;       // whether the gradient of what it writes is that of no view
    std::vector<std::pair<At, bool>> required;  // which tensors require a gradient
};

// Interns the names by which a context is filled.
void name_strings();

}  // namespace amanda
