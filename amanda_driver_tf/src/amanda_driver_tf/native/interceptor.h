/* `Interceptor`: what of the interception of eager ops is done without Python.
 *
 * Its two methods stand for the two functions through which every op goes. They let an op pass
 * that runs where it ran last time, after the op that it followed then, and that nobody asks
 * anything of. All else is left to the functions of the same names in `_eager/intercept.py`, to
 * which they turn before they have changed anything.
 */
#ifndef AMANDA_INTERCEPTOR_H
#define AMANDA_INTERCEPTOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* What an instance is given, by keyword. */
#define HELD(X) \
    X(fast_path)      /* what the methods stand for */ \
    X(execute) \
    X(slow_fast_path) /* intercept.fast_path and ... */ \
    X(slow_execute)   /* ... intercept.execute_op */ \
    X(fell_back)      /* told of an op that the original does not execute */ \
    X(fallback)       /* the exception that says so */ \
    X(module)         /* where `execute` stands */ \
    X(no_tape)        /* whether no tape records */ \
    X(pair)           /* name of the attribute by which a tape knows the record */ \
    X(op_type_of)     /* name -> OpType */ \
    X(handle_of)      /* a variable -> its handle */ \
    X(state)          /* STATE */ \
    X(thread)         /* THREAD */ \
    X(tensor)         /* the classes from here on */ \
    X(call_site) \
    X(forward) \
    X(activation) \
    X(scope) \
    X(record) \
    X(op_type) \
    X(control)

/* The slots of these classes that are read here. */
#define SLOTS(X) \
    X(forward, activations) X(forward, control) X(forward, mode) X(forward, session) \
    X(activation, counts) X(activation, last) X(activation, scope) \
    X(scope, number) X(scope, root) \
    X(record, call_site) X(record, group) X(record, idle) X(record, marks) X(record, next) \
    X(record, occurrence) X(record, op_type) X(record, operands) X(record, settled) \
    X(record, token) X(record, watched) \
    X(op_type, count) X(op_type, handles) X(op_type, kind) X(op_type, name) \
    X(control, caching) X(control, enabled) X(control, routine_depth)

/* Other attributes. */
#define NAMES(X) \
    X(_amanda_source) X(control) X(eager) X(epoch) X(execute) X(firsts) X(handed) X(mode) X(quiet) \
    X(records) X(sites) X(told) X(wants_backward)

typedef struct {
    PyObject_HEAD
#define FIELD(name) PyObject* name;
    HELD(FIELD)
#undef FIELD
#define FIELD(class, name) Py_ssize_t class##_##name;
    SLOTS(FIELD)
#undef FIELD
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

/* Whether ops of the forward program of a session are to be seen now at `place`. */
int is_watching(Interceptor* self, PyObject* place);

/* Whether nothing is to be done when an op executes; `pair` becomes whether tapes are to know it. */
int is_idle(Interceptor* self, PyObject* place, PyObject* record, int* pair);

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
