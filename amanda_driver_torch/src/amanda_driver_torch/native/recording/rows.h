// The form of a row, and what of it is computed from memory alone.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_symbols.h"

namespace amanda {

// The form is that of `amanda_core.driver_kit.recording`, which says what each field is.
struct Row {
    uint32_t order, op, step, execution, producer, type;
    uint16_t position, item;
    uint8_t what, flags;
    uint16_t thread;
    uint64_t digest;
    float norm, largest;
};
static_assert(sizeof(Row) == 48, "rows have no padding");

enum What : uint8_t { NONE, INPUT, OUTPUT };
enum Flag : uint8_t {
    UNWRITTEN = 1,
    UNREADABLE = 2,
    UNSEEN_WRITER = 4,
    REUSED = 8,
    CONSTANT = 32,
    KEPT = 64,
};
constexpr uint32_t NOBODY = 0xFFFFFFFF;
constexpr uint16_t NO_ITEM = 0xFFFF;

inline size_t bytes_of(const Memory& memory) { return size_t(memory.elements) * memory.item; }

// Returns the elements in C order: where they are, or a copy in `scratch`.
const uint8_t* in_order(const Memory& memory, std::vector<uint8_t>& scratch);

struct Norms {
    float norm = 0, largest = 0;
    bool constant = true;
};
// Returns false for elements that are not finite, for sums that are not, and for dtypes whose norms
// Python computes.
bool norms_of(const Memory& memory, const uint8_t* in_order, Norms* norms);

}  // namespace amanda
