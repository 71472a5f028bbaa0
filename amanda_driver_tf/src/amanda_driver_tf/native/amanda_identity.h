/* The rule of op identity in native code, in C and C++: the counterpart of `amanda_core.identity.sites`.
 *
 * Owns its constants, the hash of a call site, and the layout of the interpreter's frames, which no
 * other file knows. A driver ships a copy of this header.
 */
#ifndef AMANDA_IDENTITY_H
#define AMANDA_IDENTITY_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>
#include <stdint.h>

#if defined(Py_GIL_DISABLED)
#error "Frames of a free-threaded Python are not known"
#endif

/* The rule. */

/* Kinds of frames. */
enum { AMANDA_USER, AMANDA_FRAMEWORK, AMANDA_OWN, AMANDA_STOP, AMANDA_QUIET };

/* How many of the user's frames make up a call site inside a module, how many occurrences of one
 * site in one call of a module have an op of their own, and the position from which on a value that
 * may be a weight counts as one. */
enum { AMANDA_SITE_FRAMES = 3, AMANDA_OCCURRENCES = 1024, AMANDA_UNMARKED_FROM = 1 };

/* As `sites.distinguishes`. */
static inline int amanda_distinguishes(long long mark, Py_ssize_t position, int inside) {
    return mark > 0 || (mark < 0 && !inside && position >= AMANDA_UNMARKED_FROM);
}

/* Whether a frame counts in a call site; `found` says whether one counts that is further in. */
static inline int amanda_frame_counts(long kind, int found) {
    return kind == AMANDA_USER || (kind == AMANDA_FRAMEWORK && !found);
}

/* As `identity.call_offset`, given half of `f_lasti`; `code` is the `co_code` of the frame's code. */
static inline int amanda_call_offset(PyObject* code, Py_ssize_t unit) {
    const unsigned char* instructions = (const unsigned char*)PyBytes_AS_STRING(code);
    if (unit < 0 || 2 * unit >= PyBytes_GET_SIZE(code)) return -1;
#if PY_VERSION_HEX >= 0x030B0000
    while (unit > 0 && instructions[2 * unit] == 0) --unit; /* CACHE */
#endif
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000
    if (instructions[2 * unit] == 166) unit += 2; /* PRECALL */
#endif
    (void)instructions;
    return (int)(2 * unit);
}

static inline uint64_t amanda_mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 29);
}

/* The hash of a call site, given that of the frames further in: the number of the frame's code, and
 * where the frame calls from. */
static inline uint64_t amanda_hash_frame(uint64_t hash, uint64_t number, int offset) {
    return amanda_mix(hash, number << 32 | (uint32_t)offset);
}

/* Frames.
 *
 * The public API makes an object of each frame that is looked at; the chain behind it is plain
 * memory, but its layout differs between minor versions of Python. Unknown versions use the public
 * API: slower, and with the same results. A frame is valid while no Python code runs; NULL for none.
 */
#if PY_VERSION_HEX < 0x030E0000 && !defined(AMANDA_PUBLIC_FRAMES)
#define AMANDA_FRAMES_KNOWN 1
#endif

#if defined(AMANDA_FRAMES_KNOWN) && PY_VERSION_HEX >= 0x030B0000

#define AMANDA_FRAMES "the interpreter's frames"

#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE 1
#endif
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

typedef _PyInterpreterFrame AmandaFrame;

/* Skips what sys._getframe() skips: frames of C's and frames that are still being set up. */
static inline AmandaFrame* amanda_complete_frame(AmandaFrame* frame) {
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

#if PY_VERSION_HEX >= 0x030D0000
#define AMANDA_CURRENT_FRAME(thread) ((thread)->current_frame)
#define AMANDA_INSTRUCTION(frame) ((frame)->instr_ptr)
#else
#define AMANDA_CURRENT_FRAME(thread) ((thread)->cframe->current_frame)
#define AMANDA_INSTRUCTION(frame) ((frame)->prev_instr)
#endif

/* The innermost frame of the thread that holds the GIL. */
static inline AmandaFrame* amanda_innermost_frame(PyThreadState* thread) {
    return amanda_complete_frame(AMANDA_CURRENT_FRAME(thread));
}

static inline AmandaFrame* amanda_frame_back(AmandaFrame* frame) {
    return amanda_complete_frame(frame->previous);
}

/* Borrowed, as what the next two return. */
static inline PyCodeObject* amanda_frame_code(AmandaFrame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
    return (PyCodeObject*)frame->f_executable;
#else
    return frame->f_code;
#endif
}

static inline PyObject* amanda_frame_globals(AmandaFrame* frame) { return frame->f_globals; }

/* NULL if none was made yet. */
static inline PyFrameObject* amanda_frame_object(AmandaFrame* frame) { return frame->frame_obj; }

/* Half of `f_lasti`. */
static inline int amanda_frame_unit(AmandaFrame* frame) { return _PyInterpreterFrame_LASTI(frame); }

/* The frame of a frame object, borrowed from it. */
static inline AmandaFrame* amanda_frame_of(PyObject* object) {
    return ((PyFrameObject*)object)->f_frame;
}

/* What `bound` may be so that it includes a frame; NULL if that has ended. */
static inline const void* amanda_frame_around(AmandaFrame* frame) { return frame->previous; }

#define AMANDA_ARGUMENTS_KNOWN 1

/* The first positional argument, borrowed, or what was assigned to its name since; NULL for none. */
static inline PyObject* amanda_first_argument(AmandaFrame* frame) {
    if (amanda_frame_code(frame)->co_argcount == 0) return NULL;
    PyObject* found = frame->localsplus[0];
    return found != NULL && PyCell_Check(found) ? PyCell_GET(found) : found;
}

/* The addresses of the instructions that run in the frames up to `bound`, as one number; 0 if
 * there are many, or if they cannot be known. This is finer than a call site, and cheaper, because
 * no code is read. */
static inline uint64_t amanda_hash_instructions(PyThreadState* thread, const void* bound) {
    uint64_t hash = 0;
    int left = 12;
    AmandaFrame* frame = AMANDA_CURRENT_FRAME(thread);
    for (; frame != NULL && frame != bound; frame = frame->previous) {
        if (--left == 0) return 0;
        hash = amanda_mix(hash, (uintptr_t)AMANDA_INSTRUCTION(frame));
    }
    return hash;
}

#else

#define AMANDA_FRAMES "frame objects"

#include <frameobject.h>

typedef PyFrameObject AmandaFrame;

static inline AmandaFrame* amanda_innermost_frame(PyThreadState* thread) {
    (void)thread;
    return PyEval_GetFrame();
}

static inline PyFrameObject* amanda_frame_object(AmandaFrame* frame) { return frame; }

static inline AmandaFrame* amanda_frame_of(PyObject* object) { return (AmandaFrame*)object; }

static inline const void* amanda_frame_around(AmandaFrame* frame) {
    (void)frame;
    return NULL;
}

static inline uint64_t amanda_hash_instructions(PyThreadState* thread, const void* bound) {
    (void)thread, (void)bound;
    return 0;
}

#if defined(AMANDA_FRAMES_KNOWN)

static inline AmandaFrame* amanda_frame_back(AmandaFrame* frame) { return frame->f_back; }
static inline PyCodeObject* amanda_frame_code(AmandaFrame* frame) { return frame->f_code; }
static inline PyObject* amanda_frame_globals(AmandaFrame* frame) { return frame->f_globals; }
static inline int amanda_frame_unit(AmandaFrame* frame) { return frame->f_lasti; }

#else

/* The objects that this makes live as long as their frames do, so borrowed pointers serve here. */
static inline AmandaFrame* amanda_frame_back(AmandaFrame* frame) {
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_XDECREF(outer);
    return outer;
}

static inline PyCodeObject* amanda_frame_code(AmandaFrame* frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    Py_DECREF(code);
    return code;
}

static inline PyObject* amanda_frame_globals(AmandaFrame* frame) {
    PyObject* globals = PyObject_GetAttrString((PyObject*)frame, "f_globals");
    Py_XDECREF(globals);
    return globals;
}

static inline int amanda_frame_unit(AmandaFrame* frame) {
#if PY_VERSION_HEX >= 0x030B0000
    int offset = PyFrame_GetLasti(frame);
#else
    PyObject* number = PyObject_GetAttrString((PyObject*)frame, "f_lasti");
    int offset = number == NULL ? -1 : (int)PyLong_AsLong(number);
    Py_XDECREF(number);
#endif
    return offset < 0 ? -1 : offset / 2;
}

#endif
#endif

/* As `f_lasti` says it. */
static inline int amanda_frame_offset(AmandaFrame* frame) {
    int unit = amanda_frame_unit(frame);
    return unit < 0 ? -1 : 2 * unit;
}

#endif
