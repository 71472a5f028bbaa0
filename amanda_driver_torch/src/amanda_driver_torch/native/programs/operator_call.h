// An operator of torch, and a call of it: what a program runs.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "identity/identity.h"

namespace amanda {

// One function of torch that is an operator.
struct alignas(64) Definition {
    // Read by every call, so kept in one cache line.
    void* original;
    OpType type;
    bool bound;   // takes `self`
    bool single;  // takes one argument, not a tuple
    bool installed;
    void** where;  // the pointer that is redirected
    void* replacement;
    PyObject* call;  // strong: calls the original, by the binding's own convention
    PyObject* operator_;  // strong, made when first used

    PyObject* binding;  // strong: the binding in Python
    PyObject* name;

    // Borrowed; null with an exception.
    PyObject* get_operator();
};

// Returns the number of an op type's name. False on error.
bool intern_type(PyObject* name, OpType* type);
// Makes the operator of a definition: (binding, name of its type) -> operator. Strong.
extern PyObject* operator_factory;

// A call of an original.
class Call {
  public:
    explicit Call(const Operands& given) : given_(given) {}
    virtual PyObject* original() = 0;
    // Calls with other operands, as many as given; null without an exception if not possible.
    virtual PyObject* original_with(PyObject* const*) { return nullptr; }
    virtual bool takes_others() const { return false; }
    const Operands& operands() const { return given_; }
    // New references: (args with `self` in front, kwargs).
    PyObject* args() const;
    PyObject* kwargs() const;

  protected:
    ~Call() = default;

  private:
    const Operands given_;
};

}  // namespace amanda
