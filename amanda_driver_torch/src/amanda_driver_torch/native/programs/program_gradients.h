// A program's part for the gradients of an op as a whole.
#pragma once

#include "programs/program_parts.h"

namespace amanda {

// Collects the operands and returns their number.
size_t flatten(const Operands& operands, PyObject** values);

// Returns true if the same arguments require a gradient as in the program.
bool requires_the_same(const ProgramParts& parts, PyObject* const* values);

// Returns true if the arguments have the layout for which the gradient nodes were found.
bool laid_the_same(const ProgramParts& parts, PyObject* const* values);

// Calls the original with identities of those operands whose gradients are requested. If it returns
// one of them, it has done nothing, and the operand itself is returned.
Owned call_tapped(const ProgramParts& parts, Watch* watch, Call& call);

// The nodes that compute the gradients of inputs.
struct Meetings {
    bool in_graph = false;     // whether they are found again without Python objects
    std::vector<Owned> nodes;  // otherwise
};

// Finds these nodes: 1, or 0 if they differ from last time, or -1 with an exception. `in_graph`:
// whether they may be hooked without Python objects.
int find_meetings(const ProgramParts& parts, PyObject* returned, uint64_t start, bool in_graph,
                  Meetings* found);
// Hooks these nodes. False with an exception.
bool hook_meetings(const ProgramParts& parts, const Call& call, PyObject* returned, uint64_t start,
                   const Meetings& found);

// Returns true if the op has made nodes of the same outputs as in the program.
bool arrives_the_same(const ProgramParts& parts, const Call& call, PyObject* returned);

// Hooks the gradients of the op's outputs. False with an exception.
bool hook_arrivals(const ProgramParts& parts, PyObject* returned);

// Returns true if a tensor is a leaf that accumulates its gradient.
bool collects(PyObject* tensor);

// Interns the names of the attributes that are read.
void name_gradient_strings();

}  // namespace amanda
