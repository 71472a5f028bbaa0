// The edits of routines in one call.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "steps.h"

namespace amanda {

struct Watch;

class Edits {
  public:
    // Applies a routine's `result` to `values`, a list, of an op whose outputs may be its inputs or
    // views of them if it `aliases`, and that records `gradients`. False with an exception.
    bool make(Watch* watch, const ProgramStep& step, size_t number, PyObject* values,
              PyObject* result, bool aliases, bool gradients);
    // Keeps a result that was applied.
    void keep(size_t number, PyObject* result);
    bool any() const { return !results_.empty(); }
    // The results of the first `count` routines, and `last` if it is not null.
    Owned so_far(size_t count, PyObject* last = nullptr) const;

  private:
    std::vector<Owned> results_;  // by number of the routine; null for None
};

// Returns true if a routine's result may replace `old`, a value of its only position, without a check
// by Python: both are plain tensors of one shape and dtype, and Python has accepted such an edit.
bool is_accepted(const ProgramStep& step, PyObject* old, PyObject* result);

}  // namespace amanda
