// References to Python objects.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

namespace amanda {

// A strong reference. The GIL must be held when it is dropped.
class Owned {
  public:
    Owned() = default;
    explicit Owned(PyObject* stolen) : object_(stolen) {}
    Owned(const Owned& other) : object_(other.object_) { Py_XINCREF(object_); }
    Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    ~Owned() { Py_XDECREF(object_); }
    Owned& operator=(Owned other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    static Owned share(PyObject* borrowed) { return Owned(Py_XNewRef(borrowed)); }

    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject* object_ = nullptr;
};

// Returns the object of a weak reference, borrowed; never a new object at the address of a dead
// one.
inline bool leads_to(const Owned& weak, PyObject* object) {
    // A plain weak reference is the first in its object's list. That list is in memory that the
    // caller needs anyway, while reading the reference itself would be one more cache miss.
    Py_ssize_t offset = Py_TYPE(object)->tp_weaklistoffset;
    if (offset > 0 &&
        *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset) == weak.get()) {
        return bool(weak);
    }
    return weak && PyWeakref_GET_OBJECT(weak.get()) == object;
}

}  // namespace amanda
