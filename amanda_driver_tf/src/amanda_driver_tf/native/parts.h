/* What the parts of the extension module offer each other. */
#ifndef AMANDA_PARTS_H
#define AMANDA_PARTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Each adds what it owns to the module; -1 with an exception set where that fails. */
int add_call_site(PyObject* module);
int add_interceptor(PyObject* module);

/* Whether the innermost Python frame but `skipped` was called from a call site. */
int is_call_site_here(PyObject* call_site, int skipped);

#endif
