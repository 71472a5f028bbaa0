// Reads memory: digests and norms.
#include "recording/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace amanda {

namespace {

struct Axis {
    int64_t size, step;  // in elements and bytes
};

// The axes of a tensor without those of one element, and with those as one that lie like one.
std::vector<Axis> axes_of(const Memory& memory) {
    std::vector<Axis> axes;
    for (int64_t i = 0; i < memory.dimensions; ++i) {
        int64_t size = memory.sizes[i], step = memory.strides[i] * int64_t(memory.item);
        if (size == 1) continue;
        if (!axes.empty() && axes.back().step == size * step) {
            axes.back() = {axes.back().size * size, step};
        } else {
            axes.push_back({size, step});
        }
    }
    if (axes.empty()) axes.push_back({1, int64_t(memory.item)});
    return axes;
}

// Copies one axis. The size of an item is known, so that a copy is one instruction.
template <class Item>
void copy_axis(uint8_t* to, const uint8_t* from, Axis axis) {
    for (int64_t i = 0; i < axis.size; ++i) {
        std::memcpy(to + i * int64_t(sizeof(Item)), from + i * axis.step, sizeof(Item));
    }
}

#if defined(__SSE2__)
// Copies a transposed matrix of 4 x 4 items of 4 bytes, of which rows are so many bytes apart.
inline void transpose_4(uint8_t* to, int64_t width, const uint8_t* from, int64_t step) {
    auto load = [](const uint8_t* at) { return _mm_loadu_ps(reinterpret_cast<const float*>(at)); };
    auto store = [](uint8_t* at, __m128 row) { _mm_storeu_ps(reinterpret_cast<float*>(at), row); };
    __m128 a = load(from), b = load(from + step), c = load(from + 2 * step),
           d = load(from + 3 * step);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    store(to, a);
    store(to + width, b);
    store(to + 2 * width, c);
    store(to + 3 * width, d);
}
#endif

// Copies a transposed matrix of items of 4 bytes.
void copy_transposed(uint8_t* to, const uint8_t* from, int64_t rows, Axis columns) {
    constexpr int64_t ITEM = 4, TILE = 16;
    int64_t width = columns.size * ITEM, row = 0;
#if defined(__SSE2__)
    int64_t whole = columns.size / 4 * 4;
    for (; row + TILE <= rows; row += TILE) {
        for (int64_t column = 0; column < whole; column += 4) {
            for (int64_t i = row; i < row + TILE; i += 4) {
                transpose_4(to + i * width + column * ITEM, width,
                            from + column * columns.step + i * ITEM, columns.step);
            }
        }
        for (int64_t i = row; i < row + TILE; ++i) {
            copy_axis<uint32_t>(to + i * width + whole * ITEM,
                                from + whole * columns.step + i * ITEM,
                                {columns.size - whole, columns.step});
        }
    }
#endif
    for (; row < rows; ++row) copy_axis<uint32_t>(to + row * width, from + row * ITEM, columns);
}

// Copies elements in C order; returns where the next one goes.
uint8_t* copy(uint8_t* to, const uint8_t* from, const Axis* axis, size_t count, size_t item) {
    int64_t size = axis->size, step = axis->step;
    if (count > 2 || (count == 2 && (item != 4 || step != 4))) {
        for (int64_t i = 0; i < size; ++i) to = copy(to, from + i * step, axis + 1, count - 1, item);
        return to;
    }
    if (count == 2) {
        copy_transposed(to, from, size, axis[1]);
        return to + size * axis[1].size * int64_t(item);
    }
    if (step == int64_t(item)) {
        std::memcpy(to, from, size_t(size) * item);
    } else {
        switch (item) {
            case 1: copy_axis<uint8_t>(to, from, *axis); break;
            case 2: copy_axis<uint16_t>(to, from, *axis); break;
            case 4: copy_axis<uint32_t>(to, from, *axis); break;
            case 8: copy_axis<uint64_t>(to, from, *axis); break;
            default: copy_axis<uint64_t[2]>(to, from, *axis);
        }
    }
    return to + size * int64_t(item);
}

constexpr size_t LANES = 16;
// So many elements are summed in 32 bits before their sum is added in 64.
constexpr size_t BLOCK = 64 * LANES;

bool norms_of_floats(const float* values, size_t count, Norms* norms) {
    double squares = 0;
    float low = values[0], high = values[0];
    float sums[LANES], lows[LANES], highs[LANES];
    std::fill(lows, lows + LANES, low);
    std::fill(highs, highs + LANES, high);
    size_t whole = count / LANES * LANES;
    for (size_t at = 0; at < whole; at += BLOCK) {
        size_t end = std::min(at + BLOCK, whole);
        std::fill(sums, sums + LANES, 0.0F);
        for (size_t i = at; i < end; i += LANES) {
            for (size_t k = 0; k < LANES; ++k) {
                float value = values[i + k];
                sums[k] += value * value;
                lows[k] = value < lows[k] ? value : lows[k];
                highs[k] = value > highs[k] ? value : highs[k];
            }
        }
        for (float sum : sums) squares += double(sum);
    }
    for (size_t i = whole; i < count; ++i) {
        squares += double(values[i] * values[i]);
        low = std::min(low, values[i]);
        high = std::max(high, values[i]);
    }
    low = std::min(low, *std::min_element(lows, lows + LANES));
    high = std::max(high, *std::max_element(highs, highs + LANES));
    // A NaN makes the sum one. Squares overflow, or vanish, where the norm does not.
    if (!std::isfinite(squares) || (squares < 1e-30 && (low != 0 || high != 0))) return false;
    norms->norm = float(std::sqrt(squares));
    norms->largest = std::max(std::fabs(low), std::fabs(high));
    norms->constant = low == high;
    return true;
}

}  // namespace

const uint8_t* in_order(const Memory& memory, std::vector<uint8_t>& scratch) {
    size_t size = bytes_of(memory);
    if (memory.is_contiguous || size == 0) return memory.data;
    if (scratch.size() < size) scratch.resize(size);
    std::vector<Axis> axes = axes_of(memory);
    copy(scratch.data(), memory.data, axes.data(), axes.size(), memory.item);
    return scratch.data();
}

bool norms_of(const Memory& memory, const uint8_t* in_order, Norms* norms) {
    size_t count = size_t(memory.elements), size = bytes_of(memory);
    if (count == 0) return true;
    if (memory.dtype == kFloat) {
        return norms_of_floats(reinterpret_cast<const float*>(in_order), count, norms);
    }
    if (!memory.is_integer()) return false;
    norms->constant = std::memcmp(in_order, in_order + memory.item, size - memory.item) == 0;
    return true;
}

}  // namespace amanda
