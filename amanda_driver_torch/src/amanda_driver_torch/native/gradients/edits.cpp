// Edits of values.
#include "gradients/edits.h"

#include <algorithm>

#include "gradients/graphs.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

PyObject* save_nothing(PyObject*, PyObject*) { Py_RETURN_NONE; }
PyObject* give(PyObject* value, PyObject*) { return Py_NewRef(value); }
PyMethodDef saving = {"save_nothing", save_nothing, METH_O, nullptr};
PyMethodDef giving = {"give", give, METH_O, nullptr};

// Returns the values of `result` at the place of `old` in the graph, as `_replace_in_graph` of
// `gradients.edits` does. Null with an exception.
Owned at_place_of(PyObject* old, PyObject* result, PyObject* make_saved) {
    static PyObject *register_name = PyUnicode_InternFromString("register_hooks"),
                    *unpack_name = PyUnicode_InternFromString("unpack"),
                    *place_name = PyUnicode_InternFromString("_amanda_place"),
                    *nothing = PyCFunction_New(&saving, nullptr);
    Owned values(PyCFunction_New(&giving, result)),
        saved(PyObject_CallFunctionObjArgs(make_saved, old, Py_False, nullptr));
    if (!values || !saved ||
        !Owned(PyObject_CallMethodObjArgs(saved.get(), register_name, nothing, values.get(),
                                          nullptr))) {
        return Owned();
    }
    Owned value(PyObject_CallMethodNoArgs(saved.get(), unpack_name));
    void* const* tensor = value ? tensor_in(value.get()) : nullptr;
    // It does not keep alive the node that accumulates the gradients of a leaf.
    bool kept = tensor == nullptr || node_that_made(*tensor) != nullptr ||
                PyObject_SetAttr(value.get(), place_name, saved.get()) == 0;
    return kept ? std::move(value) : Owned();
}

// Returns what an op runs on instead of `old`. Null, with an exception or without one if Python has to
// find it.
Owned replacement(const Watch* watch, const ProgramStep& step, PyObject* old, PyObject* result,
                  bool aliases, bool gradients) {
    PyObject* make_saved = PyTuple_GET_ITEM(watch->saved_tensors, 0);
    if (!is_accepted(step, old, result) || is_inference(*tensor_in(result)) || !is_own(old)) {
        return Owned();
    }
    if (!requires_gradient(*tensor_in(old))) {
        return requires_gradient(*tensor_in(result)) ? Owned() : Owned::share(result);
    }
    if (!gradients || aliases || make_saved == Py_None) return Owned();
    // The user's hooks must not be called.
    Owned hooks(PyObject_CallOneArg(PyTuple_GET_ITEM(watch->saved_tensors, 1), Py_True));
    return hooks.get() == Py_None ? at_place_of(old, result, make_saved) : Owned();
}

}  // namespace

bool is_accepted(const ProgramStep& step, PyObject* old, PyObject* result) {
    if (!step.edits || result == old || !can_read_memory()) return false;
    void* const* one = tensor_in(old);
    void* const* other = tensor_in(result);
    if (one == nullptr || other == nullptr) return false;
    TensorLayout was = layout_of(*one), is = layout_of(*other);
    if (was.dimensions < 0 || was.dimensions != is.dimensions || was.dtype != is.dtype) return false;
    const int64_t *sizes = sizes_of(*one), *others = sizes_of(*other);
    return sizes != nullptr && others != nullptr &&
           std::equal(sizes, sizes + was.dimensions, others) && std::exchange(step.accepted, true);
}

bool Edits::make(Watch* watch, const ProgramStep& step, size_t number, PyObject* values,
                 PyObject* result, bool aliases, bool gradients) {
    keep(number, result);
    if (!step.all && step.positions.size() == 1) {
        int position = step.positions[0];
        Owned value = replacement(watch, step, PyList_GET_ITEM(values, position), result, aliases,
                                  gradients);
        if (value) {
            ++watch->edits;
            return PyList_SetItem(values, position, value.release()) == 0;
        }
        if (PyErr_Occurred()) return false;
    }
    Owned edit = Owned::share(watch->edit);
    PyObject* args[] = {step.step.get(), values, result, aliases ? Py_True : Py_False};
    return bool(Owned(PyObject_Vectorcall(edit.get(), args, 4, nullptr)));
}

void Edits::keep(size_t number, PyObject* result) {
    results_.resize(number + 1);
    results_[number] = Owned::share(result);
}

Owned Edits::so_far(size_t count, PyObject* last) const {
    Owned tuple(results(count, last));
    for (size_t i = 0; tuple && i < results_.size(); ++i) {
        if (results_[i]) {
            PyTuple_SetItem(tuple.get(), Py_ssize_t(i), Py_NewRef(results_[i].get()));
        }
    }
    return tuple;
}

}  // namespace amanda
