// Compiled callables: the callback of Dynamo that each gets, and what their code calls in C.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "identity/identity.h"
#include "table.h"

namespace amanda {

// The callbacks that one session has chosen for those of compiled callables.
class Callbacks {
  public:
    struct Entry {
        Owned callback;  // weak
        Owned chosen, region;
        int64_t epoch = 0;
    };

    // Null if none is known for the epoch.
    const Entry* find(PyObject* callback, int64_t epoch) {
        Entry* entry = known_.find(key_of(callback));
        bool valid = entry != nullptr && entry->epoch == epoch && leads_to(entry->callback, callback);
        return valid ? entry : nullptr;
    }
    // False on error.
    bool keep(PyObject* callback, PyObject* chosen, PyObject* region, int64_t epoch);
    void clear() { known_.clear(); }

  private:
    Table<Entry> known_;
};

int add_compiled(PyObject* module);

}  // namespace amanda
