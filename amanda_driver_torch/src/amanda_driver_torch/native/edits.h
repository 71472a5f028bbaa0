// What routines change in one call.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "steps.h"

namespace amanda {

struct Watch;

class Edits {
  public:
    // Lets `result` of a routine take effect in `values`, a list. False with an exception.
    bool make(Watch* watch, const ProgramStep& step, size_t number, PyObject* values,
              PyObject* result);
    bool any() const { return !results_.empty(); }
    // What the first `count` routines have returned, and the `last` one if there is such.
    Owned so_far(size_t count, PyObject* last = nullptr) const;

  private:
    std::vector<Owned> results_;  // by number of the routine; null for None
};

}  // namespace amanda
