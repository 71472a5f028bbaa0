// `autograd.Function.apply` where torch implements it in C. All methods bound from the class
// method share it, so that `f = MyFunction.apply` is redirected even if it was bound earlier.
#include "interception/class_method.h"

#include "memory_map.h"
#include "owned.h"
#include "thread.h"

namespace amanda {

namespace {

PyMethodDef* method = nullptr;
PyCFunction original = nullptr;
PyObject* replacement = nullptr;  // (cls, args, kwargs) -> result of the class method
bool with_keywords = false;

PyObject* run_original(PyObject* cls, PyObject* args, PyObject* kwargs) {
    if (with_keywords) {
        return reinterpret_cast<PyCFunctionWithKeywords>(
            reinterpret_cast<void (*)()>(original))(cls, args, kwargs);
    }
    if (kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0) {
        PyErr_Format(PyExc_TypeError, "%s() takes no keyword arguments", method->ml_name);
        return nullptr;
    }
    return original(cls, args);
}

PyObject* take_keywords(PyObject* cls, PyObject* args, PyObject* kwargs) {
    Thread* thread = current;
    if (thread == nullptr || thread->attachment == nullptr || thread->quiet) {
        return run_original(cls, args, kwargs);
    }
    return PyObject_CallFunctionObjArgs(replacement, cls, args,
                                        kwargs != nullptr ? kwargs : Py_None, nullptr);
}

PyObject* take(PyObject* cls, PyObject* args) { return take_keywords(cls, args, nullptr); }

PyCFunction replacement_method() {
    return with_keywords ? reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(take_keywords))
                         : take;
}

PyObject* redirect_class_method(PyObject*, PyObject* args) {
    PyObject *descriptor, *function;
    const char* folder;
    if (!PyArg_ParseTuple(args, "OOs", &descriptor, &function, &folder)) return nullptr;
    if (!Py_IS_TYPE(descriptor, &PyClassMethodDescr_Type)) {
        return PyUnicode_FromString("it is not a class method in C");
    }
    PyMethodDef* found = reinterpret_cast<PyMethodDescrObject*>(descriptor)->d_method;
    int convention = found->ml_flags & ~(METH_CLASS | METH_COEXIST);
    if (convention != METH_VARARGS && convention != (METH_VARARGS | METH_KEYWORDS)) {
        return PyUnicode_FromString("its calling convention is not known");
    }
    if (method != nullptr && method != found) {
        return PyUnicode_FromString("another class method is redirected");
    }
    Py_XSETREF(replacement, Py_NewRef(function));
    if (found->ml_meth == replacement_method()) Py_RETURN_NONE;
    if (!lies_in(reinterpret_cast<const void*>(found->ml_meth), folder)) {
        return PyUnicode_FromString("its code is not torch's");
    }
    if (!is_writable_page(&found->ml_meth)) {
        return PyUnicode_FromString("its table cannot be written");
    }
    method = found;
    original = found->ml_meth;
    with_keywords = convention != METH_VARARGS;
    found->ml_meth = replacement_method();
    Py_RETURN_NONE;
}

PyObject* restore_class_method(PyObject*, PyObject*) {
    // A later redirection on top of ours calls ours, so it stays.
    if (method != nullptr && method->ml_meth == replacement_method()) method->ml_meth = original;
    Py_RETURN_NONE;
}

PyObject* call_class_method(PyObject*, PyObject* args, PyObject* kwargs) {
    if (original == nullptr || PyTuple_GET_SIZE(args) == 0) {
        PyErr_SetString(PyExc_TypeError, "call_class_method(cls, *args), once redirected");
        return nullptr;
    }
    Owned rest(PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args)));
    return rest ? run_original(PyTuple_GET_ITEM(args, 0), rest.get(), kwargs) : nullptr;
}

PyMethodDef functions[] = {
    {"redirect_class_method", redirect_class_method, METH_VARARGS,
     "redirect_class_method(descriptor, function, folder, /)\n--\n\n"
     "Replace a class method by function(cls, args, kwargs); return why not, or None."},
    {"restore_class_method", restore_class_method, METH_NOARGS,
     "restore_class_method()\n--\n\nPut back what `redirect_class_method` found."},
    {"call_class_method",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_class_method)),
     METH_VARARGS | METH_KEYWORDS,
     "call_class_method(cls, /, *args, **kwargs)\n--\n\nCall the original class method."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_class_method(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace amanda
