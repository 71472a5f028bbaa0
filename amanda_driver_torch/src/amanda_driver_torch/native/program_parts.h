// What a program consists of.
#pragma once

#include <vector>

#include "gradients.h"
#include "program.h"

namespace amanda {

struct ProgramParts {
    ~ProgramParts();

    // Whether something is to be done at gradients of the op as a whole.
    bool hooks_gradients() const {
        return !(taps.empty() && arrivals.empty() && meetings.empty());
    }

    Owned epoch;
    std::vector<PyTypeObject*> types;  // of the arguments; held by `kinds`
    std::vector<Owned> kinds;
    std::vector<Owned> keywords;
    // Position of the signature -> argument by number, or -1 and the default.
    std::vector<int> sources;
    std::vector<Owned> defaults;
    std::vector<ProgramStep> before, after;
    Owned execution;      // what the context has of one
    Owned remember;       // () -> None: the context remembers its values for backward routines
    long nodes = -1;      // that the op makes, if these need nothing; else -1
    // Gradients of inputs: identities that hand them to a function together.
    struct Tap {
        Owned function;
        std::vector<int> arguments;  // by number
    };
    std::vector<Tap> taps;
    std::vector<Hooking> arrivals;  // gradients of the output, in the order of their hooks
    // Gradients of inputs where they meet, instead of identities in front of them.
    std::vector<Hooking> meetings;
    std::vector<std::vector<int>> shaped;  // by meeting: the arguments whose shapes it needs
    long long made = 0;                    // number of nodes of an execution with meetings
    // What decides which nodes are made, by argument: number of dimensions, whether contiguous.
    struct Laid {
        int argument, dimensions;
        bool contiguous;
        Owned dtype;
    };
    std::vector<Laid> laid;
    Owned autocast;  // () -> whether values are cast on the way
    bool with_gradients = true;  // whether it serves calls with gradients, too
    bool editable = false;       // whether the op writes none of its arguments
    std::vector<int> required;  // by argument: whether it requires a gradient; -1 for no tensor
};

// Makes the names by which a context is filled.
void name_strings();

}  // namespace amanda
