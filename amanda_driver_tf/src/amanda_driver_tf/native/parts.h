/* Functions shared by the parts of the extension module. */
#ifndef AMANDA_PARTS_H
#define AMANDA_PARTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Add the types of a part to the module; -1 with an exception set on failure. */
int add_call_site(PyObject* module);
int add_interceptor(PyObject* module);
int add_marks(PyObject* module);

/* Return true if the innermost Python frame but `skipped` is called from a call site. */
int is_call_site_here(PyObject* call_site, int skipped);

#endif
