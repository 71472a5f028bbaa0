// Recognizes a call by addresses alone, which is the whole lookup of an op that runs as last time.
#pragma once

#include "identity/identity.h"
#include "thread.h"

namespace amanda {

// Returns call site, op type and operands as one number; 0 if the site is too deep.
INLINE uint64_t fingerprint(const Identity& identity, const Thread* thread, const void* bound,
                            const OpType& type, const Operands& operands) {
    uint64_t site = amanda_hash_instructions(thread->state, bound);
    if (site == 0) return 0;
    uint64_t values = mix(generation, uint64_t(type.number));
    // A parameter is identified by its address, any other value by its type.
    auto add = [&](PyObject* value) {
        auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(value));
        values = mix(values, reinterpret_cast<uintptr_t>(kind == identity.parameter ? value : kind));
    };
    if (operands.first != nullptr) add(operands.first);
    Py_ssize_t count = operands.count;
    if (operands.names != nullptr) count += PyTuple_GET_SIZE(operands.names);
    for (Py_ssize_t i = 0; i < count; ++i) add(operands.items[i]);
    return mix(site, values) | 1;
}

// Returns the expected step if it is this call, and advances to the next one. Null if
// `Identity::locate` has to decide.
INLINE Step* expect(const Identity& identity, const Thread* thread, const OpType& type,
                    const Operands& operands) {
    PyObject* list = thread->activations;
    Py_ssize_t size = PyList_GET_SIZE(list);
    if (size == 0) return nullptr;
    Progress& progress = reinterpret_cast<Activation*>(PyList_GET_ITEM(list, size - 1))->progress;
    if (!progress.in_step || progress.position >= progress.size ||
        (operands.kwargs != nullptr && PyDict_GET_SIZE(operands.kwargs) != 0)) {
        return nullptr;
    }
    Step* step = &progress.steps[progress.position];
    if (step->fingerprint == 0 ||
        step->fingerprint != fingerprint(identity, thread, progress.bound, type, operands)) {
        return nullptr;
    }
    ++progress.position;
    return step;
}

}  // namespace amanda
