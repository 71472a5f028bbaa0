// What a program does about the gradients of an op as a whole.
#pragma once

#include "program_parts.h"

namespace amanda {

// The operands one after the other; how many there are.
size_t flatten(const Operands& operands, PyObject** values);

// Whether the arguments that require a gradient are those that the program knows.
bool requires_the_same(const ProgramParts& parts, PyObject* const* values);

// Whether the arguments lie as they did when it was found where their gradients meet.
bool laid_the_same(const ProgramParts& parts, PyObject* const* values);

// The original on identities of those operands whose gradients are wanted. Where it hands one of
// them back, it has done nothing: the operand itself comes back.
Owned call_tapped(const ProgramParts& parts, Watch* watch, Call& call);

// Hooks the nodes where the gradients of inputs meet: 1, or 0 if these are not where they were, or
// -1 with an exception.
int hook_meetings(const ProgramParts& parts, const Call& call, PyObject* returned, uint64_t start);

// Hooks the gradient that will arrive at what the op returned. False with an exception.
bool hook_arrivals(const ProgramParts& parts, const Call& call, PyObject* returned);

// Whether a tensor is a leaf that collects its gradient.
bool collects(PyObject* tensor);

// Makes the names of the attributes that are read.
void name_gradient_strings();

}  // namespace amanda
