// Recognizes a call by addresses alone, which is the whole lookup of an op that runs as last time.
#pragma once

#include "identity/identity.h"
#include "thread.h"

namespace amanda {

// Returns call site, op type and operands as one number; 0 if that does not identify the op.
INLINE uint64_t fingerprint(const Identity& identity, const Thread* thread,
                            const Progress& progress, const OpType& type,
                            const Operands& operands) {
    uint64_t site = amanda_hash_instructions(thread->state, progress.end());
    if (site == 0) return 0;
    uint64_t values = mix(generation + progress.around, uint64_t(type.number));
    bool outside = bool(progress.frame);
    Py_ssize_t position = 0;
    // A parameter is identified by its address, any other value by its type.
    bool known = operands.each([&](PyObject* value) {
        auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(value));
        values = mix(values, reinterpret_cast<uintptr_t>(kind == identity.parameter ? value : kind));
        bool may_be = outside && kind == identity.tensor && identity.may_be_weight(value, position);
        ++position;
        return !may_be;
    });
    return known ? mix(site, values) | 1 : 0;
}

// Returns the expected step if it is this call, and advances to the next one. Null if
// `Identity::locate` has to decide.
INLINE Step* expect(const Identity& identity, const Thread* thread, const OpType& type,
                    const Operands& operands) {
    PyObject* list = thread->activations;
    Py_ssize_t size = PyList_GET_SIZE(list);
    if (size == 0) return nullptr;
    Progress& progress = reinterpret_cast<Activation*>(PyList_GET_ITEM(list, size - 1))->progress;
    if (!progress.in_step || progress.position >= progress.size) return nullptr;
    Step* step = &progress.steps[progress.position];
    if (step->fingerprint == 0 ||
        step->fingerprint != fingerprint(identity, thread, progress, type, operands)) {
        return nullptr;
    }
    ++progress.position;
    return step;
}

}  // namespace amanda
