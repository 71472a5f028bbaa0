// A Python function has a `vectorcall`, which callers use without reading its code.
#include "interception/calls.h"

#include <array>

#include "owned.h"
#include "thread.h"
#include "watch.h"

namespace amanda {

namespace {

// The `vectorcall` of all functions.
vectorcallfunc plain_call = nullptr;
PyObject* wrapped_name = nullptr;

// Hastened functions and what they replace, borrowed: an entry is written when a function is hastened.
struct Replaced {
    PyObject *replacement, *original;
};
std::array<Replaced, 8> latest{};
size_t next_latest = 0;

// What a replacement replaces, borrowed; null if it does not tell.
INLINE PyObject* original_of(PyObject* replacement) {
    for (const Replaced& one : latest) {
        if (one.replacement == replacement) return one.original;
    }
    PyObject* attributes = reinterpret_cast<PyFunctionObject*>(replacement)->func_dict;
    return attributes != nullptr ? PyDict_GetItemWithError(attributes, wrapped_name) : nullptr;
}

HOT PyObject* call_unwatched(PyObject* replacement, PyObject* const* args, size_t count,
                             PyObject* names) {
    Thread* thread = current;
    if (thread == nullptr || thread->attachment == nullptr || thread->quiet || thread->opaque ||
        (thread->watch != nullptr && !thread->watch->enabled(thread))) {
        PyObject* original = original_of(replacement);
        if (original != nullptr) return PyObject_Vectorcall(original, args, count, names);
    }
    return in_python(replacement, args, count, names);
}

PyObject* run_quietly(PyObject* function, PyObject* const* args, Py_ssize_t count,
                      PyObject* names) {
    Thread* thread = current;
    if (thread != nullptr) ++thread->quiet;
    PyObject* result = PyObject_Vectorcall(function, args, size_t(count), names);
    if (thread != nullptr) --thread->quiet;
    return result;
}

// (original, in Python, whether backward passes are compiled), and the arguments of the engine.
PyObject* run_engine(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    PyObject* original = PyTuple_GET_ITEM(self, 0);
    Thread* thread = current;
    Owned compiled(PyObject_CallNoArgs(PyTuple_GET_ITEM(self, 2)));
    if (!compiled) return nullptr;
    bool is_watched =
        thread != nullptr && thread->attachment != nullptr && thread->quiet < HUSHED;
    // The fourth argument is `create_graph`.
    if (compiled.get() != Py_False || (is_watched && (count < 4 || args[3] != Py_False))) {
        return PyObject_Vectorcall(PyTuple_GET_ITEM(self, 1), args, size_t(count), names);
    }
    if (!is_watched) return PyObject_Vectorcall(original, args, size_t(count), names);
    ++thread->backward;
    ++thread->opaque;
    PyObject* result = PyObject_Vectorcall(original, args, size_t(count), names);
    --thread->opaque;
    --thread->backward;
    return result;
}

template <class Function>
PyCFunction as_method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef quiet_method = {"run_quietly", as_method(run_quietly), METH_FASTCALL | METH_KEYWORDS,
                            nullptr};
PyMethodDef engine_method = {"run_backward", as_method(run_engine), METH_FASTCALL | METH_KEYWORDS,
                             nullptr};

PyObject* quiet(PyObject*, PyObject* function) { return PyCFunction_New(&quiet_method, function); }

PyObject* engine(PyObject*, PyObject* args) {
    if (PyTuple_GET_SIZE(args) != 3) {
        PyErr_SetString(PyExc_TypeError, "engine(original, replacement, is_compiled)");
        return nullptr;
    }
    return PyCFunction_New(&engine_method, args);
}

PyObject* hasten(PyObject*, PyObject* args) {
    PyObject* replacement;
    int is_hastened;
    if (!PyArg_ParseTuple(args, "O!p", &PyFunction_Type, &replacement, &is_hastened)) return nullptr;
    for (Replaced& one : latest) {
        if (one.replacement == replacement) one = {nullptr, nullptr};
    }
    PyObject* original = is_hastened ? original_of(replacement) : nullptr;
    if (original != nullptr) latest[next_latest++ % latest.size()] = {replacement, original};
    if (is_hastened || plain_call != nullptr) {
        set_call(replacement, is_hastened ? call_unwatched : plain_call);
    }
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"quiet", quiet, METH_O,
     "quiet(function, /)\n--\n\nReturn a function whose operators are not seen."},
    {"engine", engine, METH_VARARGS,
     "engine(original, replacement, is_compiled, /)\n--\n\n"
     "Return a `run_backward` that makes operators opaque, and calls the replacement for graphs of "
     "gradients and while is_compiled()."},
    {"hasten", hasten, METH_VARARGS,
     "hasten(replacement, is_hastened, /)\n--\n\n"
     "Let a Python function call its `__wrapped__` in C where operators are not instrumented."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void set_call(PyObject* replacement, vectorcallfunc call) {
    auto* function = reinterpret_cast<PyFunctionObject*>(replacement);
    if (plain_call == nullptr) plain_call = function->vectorcall;
#if PY_VERSION_HEX >= 0x030C0000
    // It also keeps the interpreter from inlining the function's code.
    PyFunction_SetVectorcall(function, call);
#else
    function->vectorcall = call;
#endif
}

PyObject* in_python(PyObject* function, PyObject* const* args, size_t count, PyObject* names) {
    return plain_call(function, args, count, names);
}

int add_calls(PyObject* module) {
    wrapped_name = PyUnicode_InternFromString("__wrapped__");
    return PyModule_AddFunctions(module, functions);
}

}  // namespace amanda
