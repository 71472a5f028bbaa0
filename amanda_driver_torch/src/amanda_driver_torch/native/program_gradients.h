// A program's part for the gradients of an op as a whole.
#pragma once

#include "program_parts.h"

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

// Finds the nodes that compute the gradients of inputs: 1, or 0 if they differ from last time, or
// -1 with an exception.
int find_meetings(const ProgramParts& parts, PyObject* returned, uint64_t start,
                  std::vector<Owned>* nodes);
// Hooks these nodes. False with an exception.
bool hook_meetings(const ProgramParts& parts, const Call& call, const std::vector<Owned>& nodes);

// Returns true if the op has made nodes of the same outputs as in the program.
bool arrives_the_same(const ProgramParts& parts, const Call& call, PyObject* returned);

// Hooks the gradients of the op's outputs. False with an exception.
bool hook_arrivals(const ProgramParts& parts, PyObject* returned);

// Returns true if a tensor is a leaf that accumulates its gradient.
bool collects(PyObject* tensor);

// Interns the names of the attributes that are read.
void name_gradient_strings();

}  // namespace amanda
