/* `Interceptor`: what of the interception of eager ops is done without Python.
 *
 * Its methods stand for the two functions through which every op goes, and for the one that tapes
 * call for the gradient of an op. They let an op pass that runs where it ran last time, after the
 * op that it followed then, and that nobody asks anything of. All else is left to the functions of
 * the same names in `_eager/intercept.py` and `_eager/backward.py`, to which they turn before they
 * have changed anything.
 */
#ifndef AMANDA_INTERCEPTOR_H
#define AMANDA_INTERCEPTOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "amanda_switches.h"

/* What an instance is given, by keyword. */
#define HELD(X) \
    X(fast_path)      /* what the methods stand for */ \
    X(execute) \
    X(slow_fast_path) /* intercept.fast_path and ... */ \
    X(slow_execute)   /* ... intercept.execute_op */ \
    X(gradient_function) /* a third one that is stood for, and ... */ \
    X(slow_gradient_function) /* ... backward.gradient_function */ \
    X(fell_back)      /* told of an op that the original does not execute */ \
    X(fallback)       /* the exception that says so */ \
    X(module)         /* where `execute` stands */ \
    X(no_tape)        /* whether no tape records */ \
    X(recorded)       /* whether a tape records what is done with any of some tensors */ \
    X(pair)           /* name of the attribute by which a tape knows the record */ \
    X(op_type_of)     /* name -> OpType */ \
    X(handle_of)      /* a variable -> its handle */ \
    X(state)          /* STATE */ \
    X(thread)         /* THREAD */ \
    X(tensor)         /* the classes from here on */ \
    X(call_site) \
    X(place) \
    X(forward) \
    X(activation) \
    X(scope) \
    X(record) \
    X(op_type) \
    X(control)

/* The slots of these classes that are read here. */
#define SLOTS(X) \
    X(place, control) X(place, session) \
    X(forward, activations) X(forward, control) X(forward, program) X(forward, session) \
    X(activation, counts) X(activation, last) X(activation, scope) \
    X(scope, number) X(scope, root) \
    X(record, call_site) X(record, children) X(record, group) X(record, idle) X(record, marks) \
    X(record, next) X(record, occurrence) X(record, op_type) X(record, operands) \
    X(record, planned) X(record, settled) X(record, skip) X(record, token) X(record, waited) \
    X(record, watched) \
    X(op_type, count) X(op_type, handles) X(op_type, kind) X(op_type, name)

/* Other attributes. */
#define NAMES(X) \
    X(_amanda_source) X(attrs) X(control) X(eager) X(epoch) X(execute) X(firsts) X(handed) \
    X(inputs) X(must_record_gradient) X(program) X(quiet) X(record_gradient) X(records) X(sites) \
    X(told) X(wants_backward)

/* A `Control` whose switches were read last. */
typedef struct {
    PyObject* control;
    AmandaSwitches* switches;
    Py_buffer view;
} LastSwitches;

typedef struct {
    PyObject_HEAD
#define FIELD(name) PyObject* name;
    HELD(FIELD)
#undef FIELD
#define FIELD(class, name) Py_ssize_t class##_##name;
    SLOTS(FIELD)
#undef FIELD
    /* `thread_values`: the number of the thread that asked last, and its dictionaries. */
    uint64_t thread_number;
    PyObject* state_values;
    PyObject* thread_values;
    /* Of the thread that applied the tools, and of the one that asked last. */
    LastSwitches owner, own;
} Interceptor;

typedef struct {
#define FIELD(name) PyObject* name;
    NAMES(FIELD)
#undef FIELD
} Names;

/* Interned. */
extern Names names;

/* Borrowed. */
#define SLOT(object, class, name) (*(PyObject**)((char*)(object) + self->class##_##name))
#define IS(object, class) ((object) != NULL && Py_TYPE(object) == (PyTypeObject*)self->class)

enum { PLAIN, READ }; /* As in `op_types`: kinds whose outputs need no more noted than a token. */

/* The methods. */
PyObject* interceptor_fast_path(PyObject* object, PyObject* const* args, Py_ssize_t count);
PyObject* interceptor_execute(
    PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* keywords
);
PyObject* interceptor_gradient_function(
    PyObject* object, PyObject* const* args, Py_ssize_t count
);

/* Whether ops of the forward program of a session are to be seen now at `place`. */
int is_watching(Interceptor* self, PyObject* place);

/* An attribute of STATE in the calling thread. New, or NULL with an exception set. */
PyObject* get_state(Interceptor* self, PyObject* name);
int set_state(Interceptor* self, PyObject* name, PyObject* value);

/* The switches of the calling thread: `THREAD.control`. New, or NULL with an exception set. */
PyObject* get_control(Interceptor* self);

/* The switches of a control, which `last` keeps at hand; NULL, perhaps with an exception set, if
 * there are none. */
AmandaSwitches* switches_of(Interceptor* self, LastSwitches* last, PyObject* control);
void forget_switches(LastSwitches* last);

/* What is to be done when an op executes. */
typedef enum {
    BUSY,    /* something */
    UNKNOWN, /* nothing but what its gradient may ask for */
    SETTLED, /* nothing, and nothing in its gradient, which tapes are to know as the record's */
    ALONE,   /* nothing, and nobody asks about its gradient */
} Idleness;

Idleness idleness(Interceptor* self, PyObject* place, PyObject* record);

/* Whether an op with an unknown gradient needs nothing more than tapes that know its record:
 * `intercept._may_wait`, where that would say so without counting. */
int may_wait(
    Interceptor* self, PyObject* place, PyObject* record, PyObject* op_type,
    PyObject* const* args, Py_ssize_t count
);

/* Whether two objects are equal; either may be NULL. */
int equal(PyObject* left, PyObject* right);

/* Whether a value is of a type that holds no variable: `sites._NO_VARIABLES`. */
int holds_no_variable(PyObject* value);

/* The items of a tuple (or None) and after them two more. New. */
PyObject* extended(PyObject* items, PyObject* name, PyObject* value);

/* The record of an op of the forward program: `Forward.locate`. New, or NULL where that is to find
 * it; the count that its group gets is put in `passed` where there are counts. */
PyObject* located(
    Interceptor* self, PyObject* place, PyObject* activation, PyObject* op_type,
    PyObject* const* args, Py_ssize_t count, PyObject** passed
);

/* The record of a read of a variable: `Sites.read`. New, or NULL likewise. */
PyObject* read_of(
    Interceptor* self, PyObject* place, PyObject* activation, PyObject* op_type,
    PyObject* const* args, Py_ssize_t count
);

#endif
