// Detecting writes to a tensor since a routine got it.
#include "kept_result.h"

#include "torch_symbols.h"

namespace amanda {

namespace {

// The descriptors of the class: a parameter does not have attributes of these names itself.
PyObject *base_getter, *version_getter, *data_getter, *address_getter, *same_place;
PyObject *forward_mode, *forward_level;
// Without all of these, routines are called each time.
bool are_found = false;

Owned get(PyObject* descriptor, PyObject* tensor) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    return Owned(Py_TYPE(descriptor)->tp_descr_get(descriptor, tensor, type));
}

// Returns true if a view may have a tangent, which its base does not have.
bool may_have_tangent() {
    Owned level(PyObject_GetAttr(forward_mode, forward_level));
    return !level || PyLong_AsLong(level.get()) >= 0;
}

bool is_found(PyObject** place, PyObject* type, const char* name) {
    Py_XSETREF(*place, PyObject_GetAttrString(type, name));
    return *place != nullptr;
}

// Returns a tensor version; -1, without an exception, if there is none.
long long version_of(PyObject* tensor) {
    Owned version = get(version_getter, tensor);
    long long number = version ? PyLong_AsLongLong(version.get()) : -1;
    PyErr_Clear();
    return number;
}

// The address of torch's own object; null, without an exception, if there is none.
void* address_of(PyObject* tensor) {
    Owned address = get(address_getter, tensor);
    void* found = address ? PyLong_AsVoidPtr(address.get()) : nullptr;
    PyErr_Clear();
    return found;
}

}  // namespace

bool is_own(PyObject* tensor) {
    return are_found && get(base_getter, tensor).get() == Py_None && !may_have_tangent();
}

bool Content::read(PyObject* tensor) {
    base_ = get(base_getter, tensor);
    bool view = base_.get() != Py_None;
    if (!view) base_ = Owned::share(tensor);
    alias_ = get(data_getter, tensor);
    alias_address_ = alias_ ? address_of(alias_.get()) : nullptr;
    version_ = version_of(tensor);
    bool readable = base_ && alias_ && version_ >= 0 && !(view && may_have_tangent());
    PyErr_Clear();
    return readable;
}

bool Content::is(PyObject* tensor) const {
    bool same = base_.get() == tensor ||
                (!may_have_tangent() && get(base_getter, tensor).get() == base_.get());
    if (same && version_of(tensor) == version_) {
        void* address = can_compare_places() ? address_of(tensor) : nullptr;
        if (address != nullptr && alias_address_ != nullptr) {
            return lie_alike(alias_address_, address);
        }
        PyObject* values[] = {nullptr, alias_.get(), tensor};
        Owned answer(PyObject_Vectorcall(same_place, values + 1,
                                         2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
        if (answer.get() == Py_True) return true;
    }
    PyErr_Clear();
    return false;
}

int Content::traverse(visitproc visit, void* arg) const {
    Py_VISIT(base_.get());
    Py_VISIT(alias_.get());
    return 0;
}

void KeptResult::begin(PyObject* stamp, PyObject* value, bool written) {
    result_ = replacement_ = Owned();
    stamp_ = Owned::share(PyList_GET_ITEM(stamp, 0));
    // A sparse tensor has no place, and never is as it was.
    open_ = are_found && (!written || version_of(value) == version_) && given_.read(value) &&
            given_.is(value);
    if (written && are_found) version_ = version_of(value);
}

void KeptResult::end(PyObject* result, PyObject* replacement) {
    // An inference tensor has no version, and cannot be used elsewhere.
    if (open_ && version_of(result) >= 0) {
        result_ = Owned::share(result);
        if (replacement != nullptr && version_of(replacement) >= 0) {
            replacement_ = Owned::share(replacement);
        }
    }
}

int KeptResult::traverse(visitproc visit, void* arg) const {
    Py_VISIT(result_.get());
    Py_VISIT(replacement_.get());
    return given_.traverse(visit, arg);
}

void find_tensor_attributes(PyObject* type) {
    Py_XSETREF(forward_mode, PyImport_ImportModule(kForwardMode));
    Py_XSETREF(forward_level, PyUnicode_InternFromString(kForwardLevel));
    are_found = is_found(&base_getter, type, kBase) && is_found(&version_getter, type, kVersion) &&
                is_found(&data_getter, type, "data") &&
                is_found(&address_getter, type, kAddress) &&
                is_found(&same_place, type, "is_set_to") && forward_mode != nullptr &&
                forward_level != nullptr;
    PyErr_Clear();
}

}  // namespace amanda
