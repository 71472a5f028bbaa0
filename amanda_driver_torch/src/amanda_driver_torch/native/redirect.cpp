// Definitions of torch's, the functions that stand in for them, and putting back what was found.
//
// CPython reads these pointers at each call, so redirecting them in torch's own tables and function
// objects catches every reference to a binding, however early it was taken. A function pointer
// carries no data: each definition gets a function of its own, made from a template.
#include "redirect.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include <array>
#include <cstdio>
#include <cstring>
#include <string>

#include "thread.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

// torch 2.13 has about 600 methods and 900 functions that are operators.
constexpr size_t MOST = 2048;
constexpr size_t MOST_GETTERS = 16;

// Methods: their descriptors and all that is bound from them read `ml_meth` at each call.
Definition table[MOST];
size_t defined = 0;

// Functions: objects that exist once. Their hash is made of `ml_meth` (CPython 3.10 to 3.14), so
// redirecting that would hide them in everybody's dicts; the object's own `vectorcall` it is.
Definition functions_table[MOST];
size_t functions_defined = 0;
int installed = 0;

Definition getters[MOST_GETTERS];
size_t getters_defined = 0;

// Indexing: slots of the type and of all its subtypes.
Definition subscript, assignment;
PyTypeObject* indexed = nullptr;

PyObject* operator_factory = nullptr;
PyObject* type_numbers = nullptr;

// The original by its calling convention.

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
    return _PyObject_MakeTpCall(PyThreadState_Get(), function, args, PyVectorcall_NARGS(count),
                                names);
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
    // `args` points to where it lies for as long as this lives.
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

// What stands in torch's tables meanwhile: one function for each definition and convention.

template <size_t I>
PyObject* with_keywords(PyObject* self, PyObject* args, PyObject* kwargs) {
    Thread* thread = current;
    if (thread == nullptr || thread->looks_away()) {
        return reinterpret_cast<PyCFunctionWithKeywords>(table[I].original)(self, args, kwargs);
    }
    Method call(&table[I], self, args, kwargs);
    return operate(thread, &table[I], call);
}

template <size_t I>
PyObject* function_of(PyObject* function, PyObject* const* args, size_t count, PyObject* names) {
    Thread* thread = current;
    if (thread == nullptr || thread->looks_away()) {
        return call_function(&functions_table[I], function, args, count, names);
    }
    Function call(&functions_table[I], function, args, count, names);
    return operate(thread, &functions_table[I], call);
}

template <size_t I>
PyObject* positional(PyObject* self, PyObject* args) {
    Thread* thread = current;
    if (thread == nullptr || thread->looks_away()) {
        return reinterpret_cast<PyCFunction>(table[I].original)(self, args);
    }
    Positional call(&table[I], self, args);
    return operate(thread, &table[I], call);
}

template <size_t I>
PyObject* getter_of(PyObject* self, void* closure) {
    Thread* thread = current;
    if (thread == nullptr || thread->looks_away()) {
        return reinterpret_cast<getter>(getters[I].original)(self, closure);
    }
    Getter call(&getters[I], self, closure);
    return operate(thread, &getters[I], call);
}

PyObject* get_item(PyObject* self, PyObject* key) {
    Thread* thread = current;
    if (thread == nullptr || thread->looks_away()) {
        return reinterpret_cast<binaryfunc>(subscript.original)(self, key);
    }
    Subscript call(self, key);
    return operate(thread, &subscript, call);
}

int set_item(PyObject* self, PyObject* key, PyObject* value) {
    Thread* thread = current;
    if (value == nullptr || thread == nullptr || thread->looks_away()) {
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

const auto WITH_KEYWORDS = all_with_keywords(std::make_index_sequence<MOST>());
const auto POSITIONAL = all_positional(std::make_index_sequence<MOST>());
const auto FUNCTIONS = all_functions(std::make_index_sequence<MOST>());
const auto GETTERS = all_getters(std::make_index_sequence<MOST_GETTERS>());

// Which pointers may be redirected.

bool lies_in(const void* address, const char* folder) {
#if defined(_WIN32)
    (void)address, (void)folder;
    return true;
#else
    // Inherited functions (`object.__new__`) share one definition with every other type.
    Dl_info info;
    return dladdr(address, &info) != 0 && info.dli_fname != nullptr &&
           std::strncmp(info.dli_fname, folder, std::strlen(folder)) == 0;
#endif
}

bool is_writable(const void* address) {
#if defined(__linux__)
    std::FILE* maps = std::fopen("/proc/self/maps", "r");
    if (maps == nullptr) return true;
    char line[512];
    bool writable = false;
    auto wanted = reinterpret_cast<unsigned long>(address);
    while (std::fgets(line, sizeof line, maps) != nullptr) {
        unsigned long begin, end;
        char rights[5];
        if (std::sscanf(line, "%lx-%lx %4s", &begin, &end, rights) == 3 && begin <= wanted &&
            wanted < end) {
            writable = rights[1] == 'w';
            break;
        }
    }
    std::fclose(maps);
    return writable;
#else
    (void)address;
    return true;
#endif
}

// Looking at the memory map for each of 1,500 neighbours would take long.
bool is_writable_page(const void* address) {
    static uintptr_t known = 0;
    uintptr_t page = reinterpret_cast<uintptr_t>(address) >> 12;
    if (page == known) return true;
    if (!is_writable(address)) return false;
    known = page;
    return true;
}

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
    // What was redirected on top of ours leads through ours, and stays.
    if (*d.where == d.replacement) write(d, d.original);
}

// Types made meanwhile have inherited our pointers, so they are walked anew each time.
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
        if (functions_defined == MOST) return "there are more operators than expected";
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
        if (defined == MOST) return "there are more operators than expected";
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

// Names whose pointers are not what they have to be now.
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
    PyObject *factory, *is_grad_enabled, *sequence_number, *known;
    if (!PyArg_ParseTuple(args, "OOOO!", &factory, &is_grad_enabled, &sequence_number,
                          &PyCFunction_Type, &known)) {
        return nullptr;
    }
    Py_XSETREF(operator_factory, Py_NewRef(factory));
    auto* method = reinterpret_cast<PyCFunctionObject*>(known)->m_ml;
    // Redirected, it would lead to this very library.
    if (installed == 0 && find_symbols(reinterpret_cast<const void*>(method->ml_meth),
                                       is_grad_enabled, sequence_number) < 0) {
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"set_up", set_up, METH_VARARGS,
     "set_up(make_operator, is_grad_enabled, sequence_number, some_binding, /)\n--\n\n"
     "Say how operators are made and where torch is asked for its state."},
    {"define", define, METH_VARARGS,
     "define(binding, name, op_type, call, folder, /)\n--\n\n"
     "Make a binding redirectable; the reason why not, or None."},
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

PyObject* Definition::get_operator() {
    if (operator_ == nullptr) {
        operator_ = PyObject_CallFunctionObjArgs(operator_factory, binding, type.name, nullptr);
    }
    return operator_;
}

bool intern_type(PyObject* name, OpType* type) {
    if (type_numbers == nullptr && (type_numbers = PyDict_New()) == nullptr) return false;
    if (!PyUnicode_CheckExact(name)) {
        PyErr_SetString(PyExc_TypeError, "an op type is a str");
        return false;
    }
    PyObject* interned = Py_NewRef(name);
    PyUnicode_InternInPlace(&interned);
    Owned kept(interned);
    PyObject* number = PyDict_GetItemWithError(type_numbers, interned);
    if (number == nullptr) {
        if (PyErr_Occurred()) return false;
        Owned next(PyLong_FromSsize_t(PyDict_GET_SIZE(type_numbers) + 1));
        if (!next || PyDict_SetItem(type_numbers, interned, next.get()) < 0) return false;
        number = next.get();
    }
    type->number = PyLong_AsLong(number);
    type->name = interned;  // The dict keeps it.
    return true;
}

int add_redirect(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace amanda
