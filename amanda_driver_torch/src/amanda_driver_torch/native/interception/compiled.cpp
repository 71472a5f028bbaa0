// What runs at each call of a compiled callable while tools are applied.
#include "interception/compiled.h"

#include "thread.h"
#include "watch.h"

namespace amanda {

namespace {

// Some programs compile again and again.
constexpr size_t MANY = 4096;

}  // namespace

bool Callbacks::keep(PyObject* callback, PyObject* chosen, PyObject* region, int64_t epoch) {
    Owned weak(PyWeakref_NewRef(callback, nullptr));
    if (!weak) return false;
    if (known_.size() > MANY) known_.clear();
    known_.at(key_of(callback)) = {weak, Owned::share(chosen), Owned::share(region), epoch};
    return true;
}

namespace {

// (original, choose, set_region), of which the last may be None, and the callback.
PyObject* choose_callback(PyObject* self, PyObject* callback) {
    PyObject *original = PyTuple_GET_ITEM(self, 0), *choose = PyTuple_GET_ITEM(self, 1);
    Thread* thread = current;
    if (callback == Py_None || callback == Py_False || thread == nullptr ||
        thread->attachment == nullptr) {
        return PyObject_CallOneArg(original, callback);
    }
    Watch* watch = thread->watch;
    if (watch == nullptr || thread->quiet || thread->opaque || !watch->enabled(thread) ||
        !watch->switches->caching) {
        return PyObject_CallOneArg(choose, callback);
    }
    const Callbacks::Entry* known = watch->callbacks->find(callback, watch->switches->epoch);
    if (known == nullptr) return PyObject_CallOneArg(choose, callback);
    Owned chosen = known->chosen, region = known->region;
    // The user's stance may forbid it.
    Owned allowed(PyObject_CallOneArg(original, callback));
    if (!allowed) return nullptr;
    if (allowed.get() != callback) return PyObject_CallOneArg(choose, callback);
    PyObject* set_region = PyTuple_GET_ITEM(self, 2);
    if (set_region == Py_None) return chosen.release();
    Owned before(PyObject_CallOneArg(set_region, region.get()));
    return before ? chosen.release() : nullptr;
}

// Tools may change inside a call of a compiled callable, for example where a step begins.
bool is_epoch(Thread* thread, PyObject* epoch) {
    return thread == nullptr || thread->watch == nullptr ||
           thread->watch->switches->epoch == PyLong_AsLongLong(epoch);
}

PyObject* scope_number(Thread* thread) {
    Py_ssize_t depth = thread != nullptr ? PyList_GET_SIZE(thread->activations) : 0;
    if (depth == 0) return PyLong_FromLong(0);
    PyObject* last = PyList_GET_ITEM(thread->activations, depth - 1);
    return PyObject_GetAttrString(reinterpret_cast<Activation*>(last)->scope(), "number");
}

// (number, epoch)
PyObject* is_in_scope(PyObject* self, PyObject*) {
    Thread* thread = current;
    if (!is_epoch(thread, PyTuple_GET_ITEM(self, 1))) Py_RETURN_FALSE;
    Owned now(scope_number(thread));
    return now ? PyObject_RichCompare(now.get(), PyTuple_GET_ITEM(self, 0), Py_EQ) : nullptr;
}

// (code, namespace, rows, epoch, chosen), and the local variables of a frame.
PyObject* serves(PyObject* self, PyObject* variables) {
    Thread* thread = current;
    if (!is_epoch(thread, PyTuple_GET_ITEM(self, 3))) Py_RETURN_FALSE;
    PyObject* space = PyTuple_GET_ITEM(self, 1);
    if (PyDict_SetItemString(space, "L", variables) < 0) return nullptr;
    Owned objects(PyEval_EvalCode(PyTuple_GET_ITEM(self, 0), space, space));
    if (PyDict_SetItemString(space, "L", Py_None) < 0) return nullptr;
    if (!objects) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
        PyErr_Clear();  // The frame has nothing at one of the places.
        Py_RETURN_FALSE;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(objects.get());
    Owned key(PyTuple_New(count + 1));
    if (!key) return nullptr;
    for (Py_ssize_t i = 0; i <= count; ++i) {
        PyObject* number = i == 0 ? scope_number(thread)
                                  : PyLong_FromVoidPtr(PyTuple_GET_ITEM(objects.get(), i - 1));
        if (number == nullptr) return nullptr;
        PyTuple_SET_ITEM(key.get(), i, number);
    }
    PyObject* row = PyDict_GetItemWithError(PyTuple_GET_ITEM(self, 2), key.get());
    if (row == nullptr) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_False);
    Owned chosen(Py_NewRef(row));
    if (PyList_SetItem(PyTuple_GET_ITEM(self, 4), 0, chosen.release()) < 0) return nullptr;
    Py_RETURN_TRUE;
}

PyMethodDef choose_method = {"choose_callback", choose_callback, METH_O, nullptr};
PyMethodDef serves_method = {"serves", serves, METH_O, nullptr};
PyMethodDef scope_method = {"is_in_scope", is_in_scope, METH_O, nullptr};

PyObject* chooser(PyObject*, PyObject* args) {
    if (PyTuple_GET_SIZE(args) != 3) {
        PyErr_SetString(PyExc_TypeError, "chooser(original, choose, set_region)");
        return nullptr;
    }
    return PyCFunction_New(&choose_method, args);
}

PyObject* in_scope(PyObject*, PyObject* number) {
    if (!PyLong_Check(number)) {
        PyErr_SetString(PyExc_TypeError, "in_scope(number)");
        return nullptr;
    }
    Thread* thread = current;
    bool has_tools = thread != nullptr && thread->watch != nullptr;
    long long epoch = has_tools ? static_cast<long long>(thread->watch->switches->epoch) : 0;
    Owned self(Py_BuildValue("(OL)", number, epoch));
    return self ? PyCFunction_New(&scope_method, self.get()) : nullptr;
}

PyObject* serving(PyObject*, PyObject* args) {
    PyObject *code, *space, *rows, *epoch, *chosen;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!", &PyCode_Type, &code, &PyDict_Type, &space,
                          &PyDict_Type, &rows, &PyLong_Type, &epoch, &PyList_Type, &chosen)) {
        return nullptr;
    }
    return PyCFunction_New(&serves_method, args);
}

PyMethodDef functions[] = {
    {"serving", serving, METH_VARARGS,
     "serving(code, namespace, rows, epoch, chosen, /)\n--\n\n"
     "Return a function of the local variables L of a frame. It looks up the scope and the ids of "
     "what the expression returns among the rows, and puts what it finds into the list."},
    {"chooser", chooser, METH_VARARGS,
     "chooser(original, choose, set_region, /)\n--\n\n"
     "Return a function from a callback of Dynamo to the one to use: the one that the watch keeps "
     "for it, or the result of choose(callback), or without tools that of original(callback)."},
    {"in_scope", in_scope, METH_O,
     "in_scope(number, /)\n--\n\n"
     "Return a function that returns True while the scope of this number runs under the tools of "
     "this moment; 0 is none."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_compiled(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace amanda
