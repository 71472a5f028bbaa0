// Redirects torch's definitions to replacement functions, and restores them.
//
// CPython reads these pointers at each call, so redirecting them in torch's own tables and function
// objects affects every reference to a binding, even one taken earlier. A function pointer carries
// no data, so each definition gets a replacement function of its own, made from a template.
#include "interception/redirect.h"

#include <cstring>

#include "interception/thunks.h"
#include "memory_map.h"
#include "thread.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

int installed = 0;

void write(Definition& d, void* pointer) {
    __atomic_store_n(d.where, pointer, __ATOMIC_RELEASE);
}

void put_in(Definition& d) {
    if (d.where == nullptr || *d.where == d.replacement) return;
    d.original = *d.where;  // Somebody else may have redirected it meanwhile.
    write(d, d.replacement);
    d.installed = true;
}

void put_back(Definition& d) {
    if (!d.installed) return;
    d.installed = false;
    // A later redirection on top of ours calls ours, so it stays.
    if (*d.where == d.replacement) write(d, d.original);
}

// Types made meanwhile have inherited our pointers, so they are traversed each time.
void exchange_slots(PyTypeObject* type, bool in) {
    PyMappingMethods* mapping = type->tp_as_mapping;
    if (mapping != nullptr) {
        auto get = reinterpret_cast<binaryfunc>(subscript.original);
        auto set = reinterpret_cast<objobjargproc>(assignment.original);
        if (mapping->mp_subscript == (in ? get : get_item)) {
            mapping->mp_subscript = in ? get_item : get;
        }
        if (mapping->mp_ass_subscript == (in ? set : set_item)) {
            mapping->mp_ass_subscript = in ? set_item : set;
        }
    }
    Owned subtypes(
        PyObject_CallMethod(reinterpret_cast<PyObject*>(type), "__subclasses__", nullptr));
    if (!subtypes) {
        PyErr_Clear();
        return;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(subtypes.get()); ++i) {
        PyObject* subtype = PyList_GET_ITEM(subtypes.get(), i);
        if (PyType_Check(subtype)) exchange_slots(reinterpret_cast<PyTypeObject*>(subtype), in);
    }
}

// For Python.

const char* describe(PyObject* binding, const char* folder, Definition** found) {
    Definition d{};
    const void* code = nullptr;
    if (PyCFunction_CheckExact(binding)) {
        auto* function = reinterpret_cast<PyCFunctionObject*>(binding);
        d.where = reinterpret_cast<void**>(&function->vectorcall);
        code = reinterpret_cast<const void*>(function->m_ml->ml_meth);
        for (size_t i = 0; i < functions_defined; ++i) {
            if (functions_table[i].where == d.where) {
                *found = &functions_table[i];
                return nullptr;
            }
        }
        if (function->m_ml->ml_flags & (METH_O | METH_FASTCALL)) {
            return "the interpreter calls it directly";
        }
        if (functions_defined == MOST_FUNCTIONS) return "there are more operators than expected";
        d.replacement = reinterpret_cast<void*>(FUNCTIONS[functions_defined]);
        *found = &functions_table[functions_defined];
    } else if (Py_IS_TYPE(binding, &PyMethodDescr_Type)) {
        d.bound = true;
        PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(binding)->d_method;
        d.where = reinterpret_cast<void**>(&method->ml_meth);
        for (size_t i = 0; i < defined; ++i) {
            if (table[i].where == d.where) {
                *found = &table[i];
                return nullptr;
            }
        }
        int convention =
            method->ml_flags & ~(METH_STATIC | METH_CLASS | METH_COEXIST);
        if (defined == MOST_METHODS) return "there are more operators than expected";
        if (convention == (METH_VARARGS | METH_KEYWORDS)) {
            d.replacement = reinterpret_cast<void*>(WITH_KEYWORDS[defined]);
        } else if (convention == METH_VARARGS || convention == METH_O ||
                   convention == METH_NOARGS) {
            d.replacement = reinterpret_cast<void*>(POSITIONAL[defined]);
            d.single = convention == METH_O;
        } else {
            return "its calling convention is not known";
        }
        *found = &table[defined];
    } else if (Py_IS_TYPE(binding, &PyGetSetDescr_Type)) {
        d.bound = true;
        d.where = reinterpret_cast<void**>(
            &reinterpret_cast<PyGetSetDescrObject*>(binding)->d_getset->get);
        for (size_t i = 0; i < getters_defined; ++i) {
            if (getters[i].where == d.where) {
                *found = &getters[i];
                return nullptr;
            }
        }
        if (getters_defined == MOST_GETTERS) return "there are more getters than expected";
        d.replacement = reinterpret_cast<void*>(GETTERS[getters_defined]);
        *found = &getters[getters_defined];
    } else if (Py_IS_TYPE(binding, &PyWrapperDescr_Type)) {
        auto* wrapper = reinterpret_cast<PyWrapperDescrObject*>(binding);
        d.bound = true;
        d.where = &wrapper->d_wrapped;
        bool get = std::strcmp(wrapper->d_base->name, "__getitem__") == 0;
        if (!get && std::strcmp(wrapper->d_base->name, "__setitem__") != 0) {
            return "only slots of indexing are redirected";
        }
        *found = get ? &subscript : &assignment;
        if ((*found)->where != nullptr) return nullptr;
        d.replacement = get ? reinterpret_cast<void*>(get_item) : reinterpret_cast<void*>(set_item);
        indexed = PyDescr_TYPE(wrapper);
    } else {
        return "it is no binding in C";
    }
    d.original = *d.where;
    if (code == nullptr) code = d.original;
    if (code == nullptr || !lies_in(code, folder)) return "its code is not torch's";
    if (!is_writable_page(d.where)) return "its table cannot be written";
    **found = d;
    if (*found == &table[defined]) ++defined;
    if (*found == &functions_table[functions_defined]) ++functions_defined;
    if (*found == &getters[getters_defined]) ++getters_defined;
    return nullptr;
}

PyObject* define(PyObject*, PyObject* args) {
    PyObject *binding, *name, *op_type, *call;
    const char* folder;
    if (!PyArg_ParseTuple(args, "OOOOs", &binding, &name, &op_type, &call, &folder)) return nullptr;
    OpType type;
    if (!intern_type(op_type, &type)) return nullptr;
    Definition* found = nullptr;
    const char* refusal = describe(binding, folder, &found);
    if (refusal != nullptr) return PyUnicode_FromString(refusal);
    Py_XSETREF(found->binding, Py_NewRef(binding));
    Py_XSETREF(found->call, Py_NewRef(call));
    Py_XSETREF(found->name, Py_NewRef(name));
    Py_CLEAR(found->operator_);
    found->type = type;
    Py_RETURN_NONE;
}

template <class Visit>
void each_definition(Visit visit) {
    for (size_t i = 0; i < defined; ++i) visit(table[i]);
    for (size_t i = 0; i < functions_defined; ++i) visit(functions_table[i]);
    for (size_t i = 0; i < getters_defined; ++i) visit(getters[i]);
    visit(subscript);
    visit(assignment);
}

PyObject* install(PyObject*, PyObject*) {
    if (installed++ == 0) {
        each_definition(put_in);
        if (indexed != nullptr) exchange_slots(indexed, true);
    }
    Py_RETURN_NONE;
}

PyObject* uninstall(PyObject*, PyObject*) {
    if (installed > 0 && --installed == 0) {
        if (indexed != nullptr) exchange_slots(indexed, false);
        each_definition(put_back);
    }
    Py_RETURN_NONE;
}

// Returns the names whose pointers are not as they should be now.
PyObject* check(PyObject*, PyObject*) {
    Owned wrong(PyList_New(0));
    if (!wrong) return nullptr;
    each_definition([&](Definition& d) {
        if (d.where == nullptr) return;
        if (*d.where != (installed ? d.replacement : d.original)) {
            PyList_Append(wrong.get(), d.name);
        }
    });
    if (PyErr_Occurred()) return nullptr;
    return wrong.release();
}

PyObject* count(PyObject*, PyObject*) {
    return Py_BuildValue("{s:n,s:n,s:n,s:i}", "methods", Py_ssize_t(defined), "functions",
                         Py_ssize_t(functions_defined), "getters",
                         Py_ssize_t(getters_defined), "installed", installed);
}

PyObject* set_up(PyObject*, PyObject* args) {
    PyObject *factory, *known;
    Bindings bindings;
    if (!PyArg_ParseTuple(args, "OOOOOOO!", &factory, &known, &bindings.is_grad_enabled,
                          &bindings.sequence_number, &bindings.function_modes,
                          &bindings.is_observed, &PyTuple_Type,
                          &bindings.fake_tensor_checks)) {
        return nullptr;
    }
    if (known != Py_None && !PyCFunction_Check(known)) {
        PyErr_SetString(PyExc_TypeError, "the binding is a built-in function or None");
        return nullptr;
    }
    Py_XSETREF(operator_factory, Py_NewRef(factory));
    // A redirected binding would lead to this very library.
    if (installed == 0) {
        find_symbols(known != Py_None ? reinterpret_cast<const void*>(PyCFunction_GET_FUNCTION(known))
                                      : nullptr,
                     bindings);
    }
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"set_up", set_up, METH_VARARGS,
     "set_up(make_operator, some_binding, is_grad_enabled, sequence_number, function_modes, "
     "is_observed, fake_tensor_checks, /)\n--\n\n"
     "Say how operators are made, and who is asked for torch's state: the library of a binding, or "
     "the functions where it does not say (or for None)."},
    {"define", define, METH_VARARGS,
     "define(binding, name, op_type, call, folder, /)\n--\n\n"
     "Make a binding redirectable; return why not, or None."},
    {"install", install, METH_NOARGS,
     "install()\n--\n\nRedirect what was defined; counts how often it was called."},
    {"uninstall", uninstall, METH_NOARGS,
     "uninstall()\n--\n\nPut back what was found, at the last of as many calls as of install."},
    {"check", check, METH_NOARGS,
     "check()\n--\n\nNames of definitions whose pointers are not what they should be now."},
    {"count", count, METH_NOARGS, "count()\n--\n\nHow many definitions there are."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_redirect(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace amanda
