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
    // views of them if it `aliases`. False with an exception.
    bool make(Watch* watch, const ProgramStep& step, size_t number, PyObject* values,
              PyObject* result, bool aliases);
    bool any() const { return !results_.empty(); }
    // The results of the first `count` routines, and `last` if it is not null.
    Owned so_far(size_t count, PyObject* last = nullptr) const;

  private:
    std::vector<Owned> results_;  // by number of the routine; null for None
};

}  // namespace amanda
