// The replacement functions, and the tables of the definitions that they replace. Only included by
// redirect.cpp.
#pragma once

#include <array>

#include "interception/operate.h"
#include "thread.h"

namespace amanda {

namespace {

// torch has about 600 methods and 900 functions that are operators.
constexpr size_t MOST_METHODS = 1024, MOST_FUNCTIONS = 1536;
constexpr size_t MOST_GETTERS = 16;

// Methods: their descriptors, and everything bound from these, read `ml_meth` at each call.
Definition table[MOST_METHODS];
size_t defined = 0;

// Functions: single objects. Their hash contains `ml_meth` (CPython 3.10 to 3.14), so redirecting
// that would make them unfindable in dicts. Therefore the object's own `vectorcall` is redirected.
Definition functions_table[MOST_FUNCTIONS];
size_t functions_defined = 0;
Definition getters[MOST_GETTERS];
size_t getters_defined = 0;

// Indexing: slots of the type and of all its subtypes.
Definition subscript, assignment;
PyTypeObject* indexed = nullptr;

// Calls the original by its calling convention.

class Method final : public Call {
  public:
    Method(Definition* d, PyObject* self, PyObject* args, PyObject* kwargs)
        : Call(args == nullptr ? Operands{self, nullptr, 0, nullptr}
                               : Operands{self, &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args),
                                          kwargs}),
          d_(d), self_(self), args_(args), kwargs_(kwargs) {}

    PyObject* original() override {
        return reinterpret_cast<PyCFunctionWithKeywords>(d_->original)(self_, args_, kwargs_);
    }
    bool takes_others() const override { return d_->bound && args_ != nullptr; }
    PyObject* original_with(PyObject* const* values) override {
        Py_ssize_t count = PyTuple_GET_SIZE(args_);
        PyObject* self = values[0];
        Owned args(PyTuple_New(count)), kwargs;
        if (!args) return nullptr;
        for (Py_ssize_t i = 0; i < count; ++i) {
            PyTuple_SET_ITEM(args.get(), i, Py_NewRef(values[i + 1]));
        }
        if (kwargs_ != nullptr) {
            kwargs = Owned(PyDict_New());
            PyObject *name, *value;
            values += count + 1;
            for (Py_ssize_t i = 0; kwargs && PyDict_Next(kwargs_, &i, &name, &value); ++values) {
                if (PyDict_SetItem(kwargs.get(), name, *values) < 0) return nullptr;
            }
            if (!kwargs) return nullptr;
        }
        return reinterpret_cast<PyCFunctionWithKeywords>(d_->original)(self, args.get(),
                                                                       kwargs.get());
    }

  private:
    Definition* d_;
    PyObject *self_, *args_, *kwargs_;
};

PyObject* call_function(Definition* d, PyObject* function, PyObject* const* args, size_t count,
                        PyObject* names) {
    if (d->original != nullptr) {
        return reinterpret_cast<vectorcallfunc>(d->original)(function, args, count, names);
    }
    // By its type: `PyObject_Call` would look for the function's vectorcall first, which is ours.
    Py_ssize_t positional = PyVectorcall_NARGS(count);
    Owned tuple(PyTuple_New(positional)), keywords;
    if (!tuple) return nullptr;
    for (Py_ssize_t i = 0; i < positional; ++i) {
        PyTuple_SET_ITEM(tuple.get(), i, Py_NewRef(args[i]));
    }
    if (names != nullptr) {
        keywords = Owned(PyDict_New());
        if (!keywords) return nullptr;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
            PyObject *name = PyTuple_GET_ITEM(names, i), *value = args[positional + i];
            if (PyDict_SetItem(keywords.get(), name, value) < 0) return nullptr;
        }
    }
    return Py_TYPE(function)->tp_call(function, tuple.get(), keywords.get());
}

class Function final : public Call {
  public:
    Function(Definition* d, PyObject* function, PyObject* const* args, size_t count,
             PyObject* names)
        : Call({nullptr, args, PyVectorcall_NARGS(count), nullptr, names}),
          d_(d), function_(function), args_(args), count_(count), names_(names) {}

    PyObject* original() override { return call_function(d_, function_, args_, count_, names_); }
    bool takes_others() const override { return true; }
    PyObject* original_with(PyObject* const* values) override {
        return call_function(d_, function_, values, PyVectorcall_NARGS(count_), names_);
    }

  private:
    Definition* d_;
    PyObject* function_;
    PyObject* const* args_;
    size_t count_;
    PyObject* names_;
};

class Positional final : public Call {
  public:
    // `args` points into this object.
    Positional(Definition* d, PyObject* self, PyObject* const& args)
        : Call(args == nullptr ? Operands{self, nullptr, 0, nullptr}
               : d->single     ? Operands{self, &args, 1, nullptr}
                               : Operands{self, &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args),
                                          nullptr}),
          d_(d), self_(self), args_(args) {}

    PyObject* original() override {
        return reinterpret_cast<PyCFunction>(d_->original)(self_, args_);
    }

  private:
    Definition* d_;
    PyObject *self_, *args_;
};

class Getter final : public Call {
  public:
    Getter(Definition* d, PyObject* self, void* closure)
        : Call({self, nullptr, 0, nullptr}), d_(d), self_(self), closure_(closure) {}
    PyObject* original() override {
        return reinterpret_cast<getter>(d_->original)(self_, closure_);
    }

  private:
    Definition* d_;
    PyObject* self_;
    void* closure_;
};

class Subscript final : public Call {
  public:
    Subscript(PyObject* self, PyObject* const& key)
        : Call({self, &key, 1, nullptr}), self_(self), key_(key) {}
    PyObject* original() override {
        return reinterpret_cast<binaryfunc>(subscript.original)(self_, key_);
    }

  private:
    PyObject *self_, *key_;
};

class Assignment final : public Call {
  public:
    // `rest` is key and value.
    Assignment(PyObject* self, PyObject* const* rest)
        : Call({self, rest, 2, nullptr}), self_(self), rest_(rest) {}
    PyObject* original() override {
        int failed =
            reinterpret_cast<objobjargproc>(assignment.original)(self_, rest_[0], rest_[1]);
        return failed < 0 ? nullptr : Py_NewRef(Py_None);
    }

  private:
    PyObject* self_;
    PyObject* const* rest_;
};

// The replacement functions: one for each definition and convention. A program alternates between
// dozens of operators, so the code of each one is loaded from memory again and again. Therefore
// these only name their definition, and all other code is shared.

HOT PyObject* operate_with_keywords(PyObject* self, PyObject* args, PyObject* kwargs,
                                    Definition* definition) {
    Thread* thread = watched_thread(definition->type.name);
    if (thread == nullptr) {
        return reinterpret_cast<PyCFunctionWithKeywords>(definition->original)(self, args, kwargs);
    }
    Method call(definition, self, args, kwargs);
    return operate(thread, definition, call);
}

HOT PyObject* operate_function(PyObject* function, PyObject* const* args, size_t count,
                               PyObject* names, Definition* definition) {
    Thread* thread = watched_thread(definition->type.name);
    if (thread == nullptr) {
        return call_function(definition, function, args, count, names);
    }
    Function call(definition, function, args, count, names);
    return operate(thread, definition, call);
}

HOT PyObject* operate_positional(PyObject* self, PyObject* args, Definition* definition) {
    Thread* thread = watched_thread(definition->type.name);
    if (thread == nullptr) {
        return reinterpret_cast<PyCFunction>(definition->original)(self, args);
    }
    Positional call(definition, self, args);
    return operate(thread, definition, call);
}

template <size_t I>
PyObject* with_keywords(PyObject* self, PyObject* args, PyObject* kwargs) {
    return operate_with_keywords(self, args, kwargs, &table[I]);
}

template <size_t I>
PyObject* function_of(PyObject* function, PyObject* const* args, size_t count, PyObject* names) {
    return operate_function(function, args, count, names, &functions_table[I]);
}

template <size_t I>
PyObject* positional(PyObject* self, PyObject* args) {
    return operate_positional(self, args, &table[I]);
}

template <size_t I>
PyObject* getter_of(PyObject* self, void* closure) {
    Thread* thread = watched_thread(getters[I].type.name);
    if (thread == nullptr) {
        return reinterpret_cast<getter>(getters[I].original)(self, closure);
    }
    Getter call(&getters[I], self, closure);
    return operate(thread, &getters[I], call);
}

PyObject* get_item(PyObject* self, PyObject* key) {
    Thread* thread = watched_thread(subscript.type.name);
    if (thread == nullptr) {
        return reinterpret_cast<binaryfunc>(subscript.original)(self, key);
    }
    Subscript call(self, key);
    return operate(thread, &subscript, call);
}

int set_item(PyObject* self, PyObject* key, PyObject* value) {
    Thread* thread = value != nullptr ? watched_thread(assignment.type.name) : nullptr;
    if (thread == nullptr) {
        return reinterpret_cast<objobjargproc>(assignment.original)(self, key, value);
    }
    PyObject* rest[] = {key, value};
    Assignment call(self, rest);
    PyObject* result = operate(thread, &assignment, call);
    Py_XDECREF(result);
    return result == nullptr ? -1 : 0;
}

template <size_t... I>
constexpr std::array<PyCFunctionWithKeywords, sizeof...(I)> all_with_keywords(
    std::index_sequence<I...>) {
    return {with_keywords<I>...};
}
template <size_t... I>
constexpr std::array<PyCFunction, sizeof...(I)> all_positional(std::index_sequence<I...>) {
    return {positional<I>...};
}
template <size_t... I>
constexpr std::array<vectorcallfunc, sizeof...(I)> all_functions(std::index_sequence<I...>) {
    return {function_of<I>...};
}
template <size_t... I>
constexpr std::array<getter, sizeof...(I)> all_getters(std::index_sequence<I...>) {
    return {getter_of<I>...};
}

const auto WITH_KEYWORDS = all_with_keywords(std::make_index_sequence<MOST_METHODS>());
const auto POSITIONAL = all_positional(std::make_index_sequence<MOST_METHODS>());
const auto FUNCTIONS = all_functions(std::make_index_sequence<MOST_FUNCTIONS>());
const auto GETTERS = all_getters(std::make_index_sequence<MOST_GETTERS>());

}  // namespace

}  // namespace amanda
