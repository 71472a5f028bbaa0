// `Watch`: one session's hold on the redirected functions.
//
// Owns what happens at one operator: the way of an op without a plan, in C alone, and the handing
// over of all others to the attachment in Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "amanda_switches.h"
#include "identity.h"
#include "thread.h"

namespace amanda {

struct Definition;

// A call on its way to the original.
class Call {
  public:
    explicit Call(const Operands& given) : given_(given) {}
    virtual PyObject* original() = 0;
    // The same with other operands, as many as given; null without an exception where it cannot.
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
    // What every operator reads.
    PyObject_HEAD
    Identity* identity;
    PyObject* epoch;                     // as last seen; compared by identity
    int64_t seen;                        // its number
    const AmandaSwitches* switches;      // of the thread that owns the session
    bool wants_backward, watches_scopes;
    bool second_order;  // gradients of gradients are watched, which Python does
    PyObject* get_control;  // () -> the calling thread's `Control`
    PyObject *execute, *settle, *call_module, *enter_module, *module_failed,
        *resume, *edit, *annotate, *scopes, *raise_pending,
        *pending;  // of the attachment
    PyObject* tap;        // (values, function) -> identities of the values
    PyObject* session;
    Py_buffer view;  // keeps `switches`

    // Whether operators of the thread are to be instrumented now.
    bool enabled(const Thread* thread) const {
        return switches != nullptr && switches->enabled != 0 && *thread->routine_depth == 0;
    }
    // Looks whether plans may have changed. False on error.
    bool refresh() { return switches->epoch == seen || read_session(); }
    // Whether plans of `epoch` hold.
    bool caches(PyObject* of) { return switches->caching != 0 && refresh() && epoch == of; }

  private:
    COLD bool read_session();
};

// The watch behind an attachment's interceptor, or null. -1 on error.
int watch_of(PyObject* attachment, Watch** watch);

// One call of an operator by a watched thread.
PyObject* operate(Thread* thread, Definition* definition, Call& call);

// Hooks the nodes that an op has just made, by the plans of its record: 1, or 0 where Python has to,
// or -1 with an exception. Not where modes of the user's would hear of it.
int hook_record(Watch* watch, PyObject* record, PyObject* returned, uint64_t start);
// Whether that may be possible.
bool may_hook(const Watch* watch, PyObject* record);

int add_watch(PyObject* module);

}  // namespace amanda
