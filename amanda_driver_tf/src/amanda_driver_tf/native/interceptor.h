/* `Interceptor`: the part of the interception of eager ops that does not need Python.
 *
 * Its methods replace the two functions that every op calls, and the one that tapes call for the
 * gradient of an op. An op is executed at once if it follows the same op from the same call site
 * as last time and has no actions. Otherwise the methods call the functions of the same names in
 * `interception/eager_operators.py` and `gradients/eager/backward.py`, before they have changed any state.
 */
#ifndef AMANDA_INTERCEPTOR_H
#define AMANDA_INTERCEPTOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "amanda_switches.h"

/* The keyword arguments of the constructor. */
#define HELD(X) \
    X(fast_path)      /* the original functions */ \
    X(execute) \
    X(slow_fast_path) /* intercept.fast_path and ... */ \
    X(slow_execute)   /* ... intercept.execute_op */ \
    X(gradient_function) /* a third original, and ... */ \
    X(slow_gradient_function) /* ... backward.gradient_function */ \
    X(fell_back)      /* called with an op that falls back */ \
    X(fallback)       /* the exception raised by an op that falls back */ \
    X(module)         /* the module of `execute` */ \
    X(no_tape)        /* returns whether no tape records */ \
    X(recorded)       /* returns whether a tape tracks any of some tensors */ \
    X(pair)           /* name of the attribute that holds the record on a tape */ \
    X(op_type_of)     /* name -> OpType */ \
    X(handle_of)      /* a variable -> its handle */ \
    X(state)          /* STATE */ \
    X(thread)         /* THREAD */ \
    X(tensor)         /* from here on, classes */ \
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
    X(_amanda_source) X(attrs) X(control) X(eager) X(epoch) X(execute) X(firsts) X(fallbacks) \
    X(inputs) X(must_record_gradient) X(program) X(quiet) X(reads) X(record_gradient) X(sites) \
    X(is_recorded) X(wants_backward) X(unattached)

/* The switches of one `Control`, cached. */
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
    /* For `thread_values.c`: the id of the last thread, and its dictionaries. */
    uint64_t thread_number;
    PyObject* state_values;
    PyObject* thread_values;
    /* The switches of the thread that applied the tools, and of the last thread. */
    LastSwitches owner, own;
} Interceptor;

typedef struct {
#define FIELD(name) PyObject* name;
    NAMES(FIELD)
#undef FIELD
} Names;

/* Interned strings. */
extern Names names;

/* A slot's value, borrowed. */
#define SLOT(object, class, name) (*(PyObject**)((char*)(object) + self->class##_##name))
#define IS(object, class) ((object) != NULL && Py_TYPE(object) == (PyTypeObject*)self->class)

enum { PLAIN, READ }; /* As in `op_types`: kinds whose outputs need at most a token. */

/* The methods. */
PyObject* interceptor_fast_path(PyObject* object, PyObject* const* args, Py_ssize_t count);
PyObject* interceptor_execute(
    PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* keywords
);
PyObject* interceptor_gradient_function(
    PyObject* object, PyObject* const* args, Py_ssize_t count
);

/* Release a value; return false only if it exists and is false. */
int is_true(PyObject* value);

/* Return true if forward ops are instrumented now at `place`. */
int is_watching(Interceptor* self, PyObject* place);

/* Return an attribute of STATE in the calling thread. New, or NULL with an exception set. */
PyObject* get_state(Interceptor* self, PyObject* name);
int set_state(Interceptor* self, PyObject* name, PyObject* value);

/* Return `THREAD.control` of the calling thread. New, or NULL with an exception set. */
PyObject* get_control(Interceptor* self);

/* Return the switches of a control, cached in `last`; NULL, perhaps with an exception set, if there
 * are none. */
AmandaSwitches* switches_of(Interceptor* self, LastSwitches* last, PyObject* control);
void forget_switches(LastSwitches* last);

/* What has to happen when an op executes. */
typedef enum {
    BUSY,    /* it has actions */
    UNKNOWN, /* it has no actions, but its gradient may have some */
    SETTLED, /* no actions, nor in its gradient; tapes must store its record */
    ALONE,   /* no actions, and its gradient is not watched */
} Idleness;

Idleness idleness(Interceptor* self, PyObject* place, PyObject* record);

/* Return true if an op with an unknown gradient only needs its record stored on the tapes:
 * `intercept._may_wait`, in the cases where that does not count executions. */
int may_wait(
    Interceptor* self, PyObject* place, PyObject* record, PyObject* op_type,
    PyObject* const* args, Py_ssize_t count
);

/* Return true if two objects are equal; either may be NULL. */
int equal(PyObject* left, PyObject* right);

/* Return true if a value's type cannot contain a variable: `rules._NO_VARIABLES`. */
int holds_no_variable(PyObject* value);

/* Return the items of a tuple (or None) followed by two more. New. */
PyObject* extended(PyObject* items, PyObject* name, PyObject* value);

/* Return the record of a forward op: `Forward.locate`. New, or NULL if Python must find it. If ops
 * are counted, `passed` is set to the new count of the record's group. */
PyObject* located(
    Interceptor* self, PyObject* place, PyObject* activation, PyObject* op_type,
    PyObject* const* args, Py_ssize_t count, PyObject** passed
);

/* Return the record of a variable's read: `Sites.read`. New, or NULL if Python has to find it. */
PyObject* read_of(
    Interceptor* self, PyObject* place, PyObject* activation, PyObject* op_type,
    PyObject* const* args, Py_ssize_t count
);

#endif
