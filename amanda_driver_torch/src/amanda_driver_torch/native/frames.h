// The interpreter's own frames: the only file that knows their layout.
//
// A call site is read at every operator. The public API makes a frame object for each frame that
// is looked at; the chain behind it is plain memory, but its layout differs between minor versions
// of Python. Unknown versions use the public API: slower, and with the same results.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && !defined(AMANDA_PUBLIC_FRAMES)
#define AMANDA_FRAMES_KNOWN 1
#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE 1
#endif
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

#include "table.h"

namespace amanda {

#if defined(AMANDA_FRAMES_KNOWN)

constexpr const char* FRAMES = "the interpreter's frames";

// One frame of the thread that holds the GIL; valid while no Python code runs.
class Frame {
  public:
    static Frame innermost(PyThreadState* thread) {
#if PY_VERSION_HEX < 0x030D0000
        return Frame(thread->cframe->current_frame).complete();
#else
        return Frame(thread->current_frame).complete();
#endif
    }

    explicit operator bool() const { return frame_ != nullptr; }
    Frame back() const { return Frame(frame_->previous).complete(); }
    const void* address() const { return frame_; }
    PyObject* globals() const { return frame_->f_globals; }

    // Half of `f_lasti`.
    int unit() const { return _PyInterpreterFrame_LASTI(frame_); }

    PyCodeObject* code() const {
#if PY_VERSION_HEX < 0x030D0000
        return frame_->f_code;
#else
        return reinterpret_cast<PyCodeObject*>(frame_->f_executable);
#endif
    }

  private:
    explicit Frame(_PyInterpreterFrame* frame) : frame_(frame) {}

    // Skips what sys._getframe() skips: frames of C's and frames that are still being set up.
    Frame complete() const {
        _PyInterpreterFrame* frame = frame_;
        while (frame != nullptr) {
#if PY_VERSION_HEX >= 0x030C0000
            if (frame->owner == FRAME_OWNED_BY_CSTACK) {
                frame = frame->previous;
                continue;
            }
#endif
            if (frame->owner == FRAME_OWNED_BY_GENERATOR) break;
            PyCodeObject* code = Frame(frame).code();
#if PY_VERSION_HEX < 0x030D0000
            if (frame->prev_instr >= _PyCode_CODE(code) + code->_co_firsttraceable) break;
#else
            if (frame->instr_ptr >= _PyCode_CODE(code) + code->_co_firsttraceable) break;
#endif
            frame = frame->previous;
        }
        return Frame(frame);
    }

    _PyInterpreterFrame* frame_;
};

// The addresses of the instructions that run in the frames up to `bound`, as one number; 0 where
// there are many. Finer than a call site, and cheaper: no code is looked at.
inline uint64_t hash_addresses(PyThreadState* thread, const void* bound) {
    uint64_t hash = 0;
    int left = 12;
#if PY_VERSION_HEX < 0x030D0000
    _PyInterpreterFrame* frame = thread->cframe->current_frame;
#else
    _PyInterpreterFrame* frame = thread->current_frame;
#endif
    for (; frame != nullptr && frame != bound; frame = frame->previous) {
        if (--left == 0) return 0;
#if PY_VERSION_HEX < 0x030D0000
        hash = mix(hash, reinterpret_cast<uintptr_t>(frame->prev_instr));
#else
        hash = mix(hash, reinterpret_cast<uintptr_t>(frame->instr_ptr));
#endif
    }
    return hash;
}

#else

}  // namespace amanda

#include <frameobject.h>

namespace amanda {

constexpr const char* FRAMES = "frame objects";

// The same over the public API. The objects that it makes live as long as their frames do, so a
// borrowed pointer serves here.
class Frame {
  public:
    static Frame innermost(PyThreadState*) { return Frame(PyEval_GetFrame()); }

    explicit operator bool() const { return frame_ != nullptr; }
    const void* address() const { return frame_; }
    PyObject* globals() const {
        PyObject* globals = PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame_), "f_globals");
        Py_XDECREF(globals);
        return globals;
    }

    Frame back() const {
        PyFrameObject* frame = PyFrame_GetBack(frame_);
        Py_XDECREF(frame);
        return Frame(frame);
    }

    // Half of `f_lasti`.
    int unit() const {
#if PY_VERSION_HEX >= 0x030B0000
        return PyFrame_GetLasti(frame_) / 2;
#else
        PyObject* offset = PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame_), "f_lasti");
        int number = offset == nullptr ? -1 : int(PyLong_AsLong(offset));
        Py_XDECREF(offset);
        return number / 2;
#endif
    }

    PyCodeObject* code() const {
        PyCodeObject* code = PyFrame_GetCode(frame_);
        Py_DECREF(code);
        return code;
    }

  private:
    explicit Frame(PyFrameObject* frame) : frame_(frame) {}
    PyFrameObject* frame_;
};

inline uint64_t hash_addresses(PyThreadState*, const void*) { return 0; }  // Unknown.

#endif

}  // namespace amanda
