// What is kept for each thread: who watches it, where it is, and whether to look away.
//
// The fields are those of Python's STATE; descriptors give them to it (`make_fields`), so that
// Python and the redirected functions read and write the same memory.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace amanda {

struct Watch;

struct Thread {
    // What every operator reads, in one line of the cache.
    PyObject_HEAD
    Watch* watch;             // of `attachment`, if that has a native interceptor
    PyObject* activations;    // strong, a list
    int64_t* routine_depth;   // how deep it is inside routines
    int depth;              // more than 0: inside an operator
    int quiet;
    int opaque;
    int backward;  // how many backward passes it is inside
    PyThreadState* state;
    PyObject* attachment;  // strong, or null for None
    Py_buffer switches;    // of this thread, while it is watched; keeps `routine_depth`
    bool recomputing;  // a checkpointed function is being run again
    bool refused;      // the original answered NotImplemented

    bool looks_away() const { return watch == nullptr || (depth | quiet | opaque) != 0; }
};

// Of the calling thread; null until it is first asked for from Python.
#if defined(__GLIBC__)
// One pointer fits into the reserve that the loader keeps, and is read without a call.
extern thread_local Thread* current __attribute__((tls_model("initial-exec")));
#else
extern thread_local Thread* current;
#endif

// Extent of an operator: what is called in it is not seen.
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
