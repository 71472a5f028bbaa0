// Operators as Python sees them, and the arguments of their calls.
#include "programs/operator_call.h"

namespace amanda {

PyObject* operator_factory = nullptr;

namespace {

PyObject* type_numbers = nullptr;

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
    type->name = interned;  // The dict owns the string.
    return true;
}

PyObject* Call::args() const {
    Operands given = operands();
    Py_ssize_t shift = given.first != nullptr;
    PyObject* args = PyTuple_New(given.count + shift);
    if (args == nullptr) return nullptr;
    if (shift) PyTuple_SET_ITEM(args, 0, Py_NewRef(given.first));
    for (Py_ssize_t i = 0; i < given.count; ++i) {
        PyTuple_SET_ITEM(args, i + shift, Py_NewRef(given.items[i]));
    }
    return args;
}

PyObject* Call::kwargs() const {
    return operands().keywords();
}

}  // namespace amanda
