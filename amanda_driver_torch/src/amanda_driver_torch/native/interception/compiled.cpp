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

// (number, epoch)
PyObject* is_in_scope(PyObject* self, PyObject*) {
    Thread* thread = current;
    PyObject* number = PyTuple_GET_ITEM(self, 0);
    // Tools may change inside a call of a compiled callable, for example where a step begins.
    if (thread != nullptr && thread->watch != nullptr &&
        thread->watch->switches->epoch != PyLong_AsLongLong(PyTuple_GET_ITEM(self, 1))) {
        Py_RETURN_FALSE;
    }
    Py_ssize_t depth = thread != nullptr ? PyList_GET_SIZE(thread->activations) : 0;
    if (depth == 0) return PyBool_FromLong(PyLong_AsLong(number) == 0);
    PyObject* last = PyList_GET_ITEM(thread->activations, depth - 1);
    Owned now(PyObject_GetAttrString(reinterpret_cast<Activation*>(last)->scope(), "number"));
    return now ? PyObject_RichCompare(now.get(), number, Py_EQ) : nullptr;
}

PyMethodDef choose_method = {"choose_callback", choose_callback, METH_O, nullptr};
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

PyMethodDef functions[] = {
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
