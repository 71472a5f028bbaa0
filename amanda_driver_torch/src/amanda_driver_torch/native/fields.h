// The objects from which watches and programs are made: their fields, which C reads by attribute.
// `native_fields.py` has the classes, and says what each field is.
#pragma once

#include "owned.h"

// What a watch keeps, and what it gives on: to the rule of identity, and the types that C reads.
#define AMANDA_WATCH_FIELDS(FIELD)                                                             \
    FIELD(get_control, ANY)                                                                    \
    FIELD(execute, TUPLE)                                                                      \
    FIELD(settle, TUPLE)                                                                       \
    FIELD(call_module, ANY)                                                                    \
    FIELD(enter_module, ANY)                                                                   \
    FIELD(module_failed, ANY)                                                                  \
    FIELD(resume, TUPLE)                                                                       \
    FIELD(edit, ANY)                                                                           \
    FIELD(saved_tensors, TUPLE)                                                                \
    FIELD(annotate, ANY)                                                                       \
    FIELD(scopes, ANY)                                                                         \
    FIELD(raise_pending, ANY)                                                                  \
    FIELD(pending, LIST)                                                                       \
    FIELD(session, ANY)                                                                        \
    FIELD(tap, ANY)                                                                            \
    FIELD(weakly, ANY)                                                                         \
    FIELD(weak_value, ANY)                                                                     \
    FIELD(failed, ANY)                                                                         \
    FIELD(memoized, ANY)
#define AMANDA_WATCH_GIVEN_ON(FIELD)                                                           \
    FIELD(classify, ANY)                                                                       \
    FIELD(look_up, ANY)                                                                        \
    FIELD(resolve, TUPLE)                                                                      \
    FIELD(region, TUPLE)                                                                       \
    FIELD(is_weight, ANY)                                                                      \
    FIELD(record_type, ANY)                                                                    \
    FIELD(parameter_type, ANY)                                                                 \
    FIELD(tensor_type, ANY)

#define AMANDA_PROGRAM_FIELDS(FIELD)                                                           \
    FIELD(epoch, ANY)                                                                          \
    FIELD(watch, ANY)                                                                          \
    FIELD(context, ANY)                                                                        \
    FIELD(execution, DICT)                                                                     \
    FIELD(operands, TUPLE)                                                                     \
    FIELD(keywords, TUPLE)                                                                     \
    FIELD(sources, TUPLE)                                                                      \
    FIELD(defaults, TUPLE)                                                                     \
    FIELD(spread, NUMBER)                                                                      \
    FIELD(fixed, LIST)                                                                         \
    FIELD(outs, TUPLE)                                                                         \
    FIELD(before, ANY)                                                                         \
    FIELD(after, ANY)                                                                          \
    FIELD(outputs, NUMBER)                                                                     \
    FIELD(nodes, NUMBER)                                                                       \
    FIELD(with_gradients, NUMBER)                                                              \
    FIELD(writes, ANY)                                                                         \
    FIELD(aliases, NUMBER)                                                                     \
    FIELD(assigns, NUMBER)                                                                     \
    FIELD(gradients, ANY)

#define AMANDA_GRADIENT_FIELDS(FIELD)                                                          \
    FIELD(taps, LIST)                                                                          \
    FIELD(required, LIST)                                                                      \
    FIELD(lengths, LIST)                                                                       \
    FIELD(arrivals, ANY)                                                                       \
    FIELD(nodes, ANY)                                                                          \
    FIELD(in_place, NUMBER)                                                                    \
    FIELD(saved_hooks, ANY)

namespace amanda {

enum class FieldKind { ANY, TUPLE, LIST, DICT, NUMBER };

// Reads one field. Null with an exception, also if its value is of another kind.
inline Owned read_field(PyObject* object, PyObject* name, FieldKind kind) {
    Owned value(PyObject_GetAttr(object, name));
    PyObject* found = value.get();
    if (found == nullptr || kind == FieldKind::ANY ||
        (kind == FieldKind::TUPLE && PyTuple_Check(found)) ||
        (kind == FieldKind::LIST && PyList_Check(found)) ||
        (kind == FieldKind::DICT && PyDict_Check(found)) ||
        (kind == FieldKind::NUMBER && PyLong_Check(found))) {
        return value;
    }
    PyErr_Format(PyExc_TypeError, "the field %U cannot be a %s", name, Py_TYPE(found)->tp_name);
    return Owned();
}

#define AMANDA_DECLARE_FIELD(name, kind) Owned name;
#define AMANDA_READ_FIELD(name, kind)                                                          \
    static PyObject* const name_of_##name = PyUnicode_InternFromString(#name);                 \
    if (!(name = read_field(object, name_of_##name, FieldKind::kind))) return false;

// Read all fields. False with an exception.
struct WatchFields {
    AMANDA_WATCH_FIELDS(AMANDA_DECLARE_FIELD)
    AMANDA_WATCH_GIVEN_ON(AMANDA_DECLARE_FIELD)

    bool read(PyObject* object) {
        AMANDA_WATCH_FIELDS(AMANDA_READ_FIELD)
        AMANDA_WATCH_GIVEN_ON(AMANDA_READ_FIELD)
        return true;
    }
};

struct ProgramFields {
    AMANDA_PROGRAM_FIELDS(AMANDA_DECLARE_FIELD)

    bool read(PyObject* object) {
        AMANDA_PROGRAM_FIELDS(AMANDA_READ_FIELD)
        return true;
    }
};

struct GradientFields {
    AMANDA_GRADIENT_FIELDS(AMANDA_DECLARE_FIELD)

    bool read(PyObject* object) {
        AMANDA_GRADIENT_FIELDS(AMANDA_READ_FIELD)
        return true;
    }
};

}  // namespace amanda
