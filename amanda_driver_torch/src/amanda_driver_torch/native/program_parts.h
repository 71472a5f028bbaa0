// What a program consists of.
#pragma once

#include <vector>

#include "gradients.h"
#include "program.h"

namespace amanda {

struct ProgramParts {
    ~ProgramParts();

    Owned epoch;
    std::vector<PyTypeObject*> types;  // of the arguments; held by `kinds`
    std::vector<Owned> kinds;
    std::vector<Owned> keywords;
    // Position of the signature -> argument by number, or -1 and the default.
    std::vector<int> sources;
    std::vector<Owned> defaults;
    std::vector<ProgramStep> before, after;
    Owned state, values;  // the context's attributes and its values
    Owned constant;       // gives constants by position
    long nodes = -1;      // that the op makes, if these need nothing; else -1
    // Gradients of inputs: identities that hand them to a function together.
    struct Tap {
        Owned function;
        std::vector<int> arguments;  // by number
    };
    std::vector<Tap> taps;
    std::vector<Arrival> arrivals;  // gradients of the output, in the order of their hooks
    bool with_gradients = true;  // whether it serves calls with gradients, too
    std::vector<int> required;  // by argument: whether it requires a gradient; -1 for no tensor
};

// Makes the names by which a context is filled.
void name_strings();

}  // namespace amanda
