// The state of each thread: its attachment, the running modules, and what to ignore.
//
// The fields are those of Python's STATE, which accesses them by descriptors (`make_fields`), so
// that Python and the redirected functions read and write the same memory.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

#include "table.h"

namespace amanda {

struct Watch;

struct Thread {
    // Read by every operator, so kept in one cache line.
    PyObject_HEAD
    Watch* watch;             // of `attachment`, if that has a native interceptor
    PyObject* activations;    // strong, a list
    int64_t* routine_depth;   // nesting depth of routines
    int depth;              // more than 0: inside an operator
    int quiet;
    int opaque;
    int backward;  // number of nested backward passes
    PyThreadState* state;
    PyObject* attachment;  // strong, or null for None
    Py_buffer switches;    // of this thread, while it is watched; owns `routine_depth`
    bool recomputing;  // a checkpointed function is being recomputed
    bool refused;      // the original returned NotImplemented
    unsigned asked;    // when `ask` was last called for it

    bool looks_away() const { return watch == nullptr || (depth | quiet | opaque) != 0; }
};

// What is added to `quiet` by a thread that ends the instrumentation of this one: more than it counts
// by itself.
constexpr int HUSHED = 1 << 20;

// The state of the calling thread; null until Python first reads it.
#if defined(__GLIBC__)
// One pointer fits into the loader's reserved TLS space, so it is read without a call.
extern thread_local Thread* current __attribute__((tls_model("initial-exec")));
#else
extern thread_local Thread* current;
#endif

// Called once for each thread without a session, with the name of an operator that it runs, or with
// None for a module that it calls; null while no session is attached. It may attach a session to the
// thread. `asking` grows whenever it must be called again.
extern PyObject* ask;
extern unsigned asking;

// Returns true if a session is attached to the calling thread, to which none was.
COLD bool has_joined(PyObject* op = Py_None);

// Returns the calling thread's state if its operators are instrumented, else null.
INLINE Thread* watched_thread(PyObject* op) {
    Thread* thread = current;
    if (thread != nullptr && thread->watch != nullptr) {
        return thread->looks_away() ? nullptr : thread;
    }
    return ask != nullptr && has_joined(op) && !current->looks_away() ? current : nullptr;
}

// The context of an operator, inside which no further operators are seen.
class Inside {
  public:
    explicit Inside(Thread* thread) : thread_(thread) { ++thread_->depth; }
    ~Inside() { --thread_->depth; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

  private:
    Thread* thread_;
};

// Adds the type of threads and, as a dict `THREAD_FIELDS`, the descriptors. -1 on error.
int add_thread(PyObject* module);

}  // namespace amanda
