// `Watch`: connects one session to the redirected functions.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "amanda_switches.h"
#include "fields.h"
#include "table.h"
#include "thread.h"

namespace amanda {

class Callbacks;
class Identity;

extern PyTypeObject* watch_type;

#define AMANDA_DECLARE_POINTER(name, kind) PyObject* name;

struct Watch {
    // Read by every operator.
    PyObject_HEAD
    Identity* identity;
    PyObject* epoch;                     // the last one read; compared by identity
    int64_t seen;                        // its number
    const AmandaSwitches* switches;      // of the session's thread
    bool wants_backward, watches_scopes, watches_calls;
    int64_t edits;      // number of values that were edited without Python
    bool second_order;  // gradients of gradients are analysed, which Python does
    // Its fields, which are null once the session has ended.
    AMANDA_WATCH_FIELDS(AMANDA_DECLARE_POINTER)
    Callbacks* callbacks;  // of compiled callables
    Py_buffer view;  // owns `switches`

    // Returns true if operators of the thread are instrumented now.
    bool enabled(const Thread* thread) const {
        return switches != nullptr && switches->enabled != 0 && *thread->routine_depth == 0;
    }
    // Checks whether plans may have changed. False on error.
    bool refresh() { return switches->epoch == seen || read_session(); }
    // Returns true if plans of `epoch` are valid.
    bool caches(PyObject* of) { return switches->caching != 0 && refresh() && epoch == of; }

  private:
    COLD bool read_session();
};

// Gets the watch of an attachment's interceptor, or null. -1 on error.
int watch_of(PyObject* attachment, Watch** watch);

// Returns true if the operator or module call at `where` may run plainly although the driver failed
// before it; else the error, which the attachment judges, stays set.
bool is_skipped(Watch* watch, PyObject* where);

}  // namespace amanda
