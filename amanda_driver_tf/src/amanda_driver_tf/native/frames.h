/* The interpreter's own frames: the only file that knows their layout.
 *
 * A call site is read at every op. The public API makes an object of each frame that is looked at;
 * the chain behind it is plain memory, but its layout differs between minor versions of Python.
 * Where it is not known there is no extension, and `call_sites` reads frames in Python.
 */
#ifndef AMANDA_FRAMES_H
#define AMANDA_FRAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(Py_GIL_DISABLED)
#error "Frames of a free-threaded Python are not known"
#elif PY_VERSION_HEX < 0x030A0000 || PY_VERSION_HEX >= 0x030E0000
#error "Frames of this version of Python are not known"
#elif PY_VERSION_HEX >= 0x030B0000
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#else
#include <frameobject.h>
#endif

/* A frame of the thread that holds the GIL; valid while no Python code runs. */
#if PY_VERSION_HEX >= 0x030B0000
typedef _PyInterpreterFrame Frame;
#else
typedef PyFrameObject Frame;
#endif

#if PY_VERSION_HEX >= 0x030B0000

/* Skips what sys._getframe() skips: frames of C's and frames that are still being set up. */
static inline Frame* complete(Frame* frame) {
    while (frame != NULL) {
#if PY_VERSION_HEX >= 0x030C0000
        /* Known without a look at its code. */
        if (frame->owner == FRAME_OWNED_BY_CSTACK) {
            frame = frame->previous;
            continue;
        }
#endif
        if (!_PyFrame_IsIncomplete(frame)) break;
        frame = frame->previous;
    }
    return frame;
}

static inline Frame* innermost(void) {
#if PY_VERSION_HEX >= 0x030D0000
    return complete(PyThreadState_Get()->current_frame);
#else
    return complete(PyThreadState_Get()->cframe->current_frame);
#endif
}

static inline Frame* back(Frame* frame) { return complete(frame->previous); }

/* Borrowed. */
static inline PyCodeObject* code_of(Frame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
    return _PyFrame_GetCode(frame);
#else
    return frame->f_code;
#endif
}

/* Borrowed; NULL where none was made yet. */
static inline PyFrameObject* object_of(Frame* frame) { return frame->frame_obj; }

/* As `f_lasti` says it. */
static inline int offset_of(Frame* frame) {
    int index = _PyInterpreterFrame_LASTI(frame);
    return index < 0 ? -1 : index * (int)sizeof(_Py_CODEUNIT);
}

#else

static inline Frame* innermost(void) { return PyThreadState_Get()->frame; }
static inline Frame* back(Frame* frame) { return frame->f_back; }
static inline PyCodeObject* code_of(Frame* frame) { return frame->f_code; }
static inline PyFrameObject* object_of(Frame* frame) { return frame; }
static inline int offset_of(Frame* frame) {
    return frame->f_lasti < 0 ? -1 : frame->f_lasti * (int)sizeof(_Py_CODEUNIT);
}

#endif

#endif
