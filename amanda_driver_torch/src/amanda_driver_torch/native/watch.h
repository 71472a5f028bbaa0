// `Watch`: connects one session to the redirected functions.
//
// Owns what happens at one operator: an op without a plan is handled in C alone, and all others are
// passed to the attachment in Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "amanda_switches.h"
#include "identity.h"
#include "thread.h"

namespace amanda {

class Callbacks;
struct Definition;

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

struct Watch {
    // Read by every operator.
    PyObject_HEAD
    Identity* identity;
    PyObject* epoch;                     // the last one read; compared by identity
    int64_t seen;                        // its number
    const AmandaSwitches* switches;      // of the session's thread
    bool wants_backward, watches_scopes, watches_calls;
    bool second_order;  // gradients of gradients are analysed, which Python does
    PyObject* get_control;  // () -> the calling thread's `Control`
    PyObject *execute, *settle, *call_module, *enter_module, *module_failed,
        *resume, *edit, *annotate, *scopes, *raise_pending,
        *pending;  // of the attachment
    PyObject* tap;        // (values, function) -> identities of the values
    PyObject *weakly, *weak_value;  // of the core: (value) -> its weak form, and that of a tensor
    PyObject* memoized;  // of the core: the type of routines whose results may be used again
    PyObject* session;
    PyObject* failed;  // (error of the driver, op type) -> raises it, or lists the op
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

// Executes one call of an operator by a watched thread.
PyObject* operate(Thread* thread, Definition* definition, Call& call);

// Hooks the nodes that an op has just made, by the plans of its record: 1, or 0 if Python has to do
// so, or -1 with an exception. Must not be called while the user's modes would see it.
int hook_record(Watch* watch, PyObject* record, PyObject* returned, uint64_t start);
// Returns true if that may be possible.
bool may_hook(const Watch* watch, PyObject* record);
// Returns true if nodes may be hooked only when the first of them runs.
bool hooks_later(const Watch* watch, PyObject* record);

int add_watch(PyObject* module);

}  // namespace amanda
