// Reads memory: digests and norms.
#include "recording/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define AMANDA_AVX2
#include <immintrin.h>
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

// Copies bytes of which there are few in most cases: a call would take longer.
inline void copy_row(uint8_t* to, const uint8_t* from, size_t size) {
    if (size % 16 != 0 || size > 256) {
        std::memcpy(to, from, size);
        return;
    }
    for (size_t at = 0; at != size; at += 16) {
        uint64_t two[2];
        std::memcpy(two, from + at, sizeof two);
        std::memcpy(to + at, two, sizeof two);
    }
}

// Copies elements in C order; returns where the next one goes.
uint8_t* copy(uint8_t* to, const uint8_t* from, const Axis* axis, size_t count, size_t item) {
    int64_t size = axis->size, step = axis->step;
    if (count == 2 && axis[1].step == int64_t(item)) {
        size_t row = size_t(axis[1].size) * item;
        for (int64_t i = 0; i < size; ++i) copy_row(to + size_t(i) * row, from + i * step, row);
        return to + size_t(size) * row;
    }
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

// What the norms of elements follow from.
struct Extent {
    double squares = 0, low, high;
};

constexpr size_t LANES = 16;
// So many elements are summed in their own dtype before their sum is added in 64 bits.
constexpr size_t BLOCK = 64 * LANES;

// Adds elements to an extent, whose bounds are those of earlier ones. A NaN makes the sum one.
template <class Number>
void extend(const Number* values, size_t count, Extent* extent) {
    Number sums[LANES], lows[LANES], highs[LANES];
    std::fill(lows, lows + LANES, Number(extent->low));
    std::fill(highs, highs + LANES, Number(extent->high));
    size_t whole = count / LANES * LANES;
    for (size_t at = 0; at < whole; at += BLOCK) {
        size_t end = std::min(at + BLOCK, whole);
        std::fill(sums, sums + LANES, Number(0));
        for (size_t i = at; i < end; i += LANES) {
            for (size_t k = 0; k < LANES; ++k) {
                Number value = values[i + k];
                sums[k] += value * value;
                lows[k] = value < lows[k] ? value : lows[k];
                highs[k] = value > highs[k] ? value : highs[k];
            }
        }
        for (Number sum : sums) extent->squares += double(sum);
    }
    for (size_t i = whole; i < count; ++i) {
        extent->squares += double(values[i] * values[i]);
        lows[0] = std::min(lows[0], values[i]);
        highs[0] = std::max(highs[0], values[i]);
    }
    extent->low = double(*std::min_element(lows, lows + LANES));
    extent->high = double(*std::max_element(highs, highs + LANES));
}

#if defined(AMANDA_AVX2)
// Does the same with all lanes in registers, for whole blocks and lanes; returns how many elements.
__attribute__((target("avx2"))) size_t extend_avx2(const float* values, size_t count,
                                                   Extent* extent) {
    __m256 low = _mm256_set1_ps(float(extent->low)), high = _mm256_set1_ps(float(extent->high));
    size_t whole = count / LANES * LANES;
    for (size_t at = 0; at < whole;) {
        __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (size_t end = std::min(at + BLOCK, whole); at < end; at += LANES) {
            __m256 one = _mm256_loadu_ps(values + at), other = _mm256_loadu_ps(values + at + 8);
            sums[0] = _mm256_add_ps(sums[0], _mm256_mul_ps(one, one));
            sums[1] = _mm256_add_ps(sums[1], _mm256_mul_ps(other, other));
            low = _mm256_min_ps(other, _mm256_min_ps(one, low));
            high = _mm256_max_ps(other, _mm256_max_ps(one, high));
        }
        for (size_t k = 0; k < LANES; ++k) extent->squares += double(sums[k / 8][k % 8]);
    }
    for (size_t k = 0; k < 8; ++k) {
        extent->low = std::min(extent->low, double(low[k]));
        extent->high = std::max(extent->high, double(high[k]));
    }
    return whole;
}
#endif

void extend_floats(const float* values, size_t count, Extent* extent) {
    size_t done = 0;
#if defined(AMANDA_AVX2)
    static const bool is_wide = __builtin_cpu_supports("avx2");
    if (is_wide) done = extend_avx2(values, count, extent);
#endif
    extend(values + done, count - done, extent);
}

double number_of(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return double(number);
}

double of_bfloat16(uint16_t bits) { return number_of(uint32_t(bits) << 16); }

double of_half(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7FFF;
    if (rest < 0x400) return (sign ? -1.0 : 1.0) * rest / (1 << 24);
    return number_of(sign | ((rest << 13) + ((rest < 0x7C00 ? 112U : 224U) << 23)));
}

template <double (*decoded)(uint16_t)>
void extend_decoded(const uint16_t* values, size_t count, Extent* extent) {
    double numbers[BLOCK];
    extent->low = extent->high = decoded(values[0]);
    for (size_t at = 0; at < count; at += BLOCK) {
        size_t size = std::min(BLOCK, count - at);
        for (size_t i = 0; i < size; ++i) numbers[i] = decoded(values[at + i]);
        extend(numbers, size, extent);
    }
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
    if (memory.is_integer()) {
        norms->constant = std::memcmp(in_order, in_order + memory.item, size - memory.item) == 0;
        return true;
    }
    Extent extent;
    if (memory.dtype == kFloat) {
        auto* values = reinterpret_cast<const float*>(in_order);
        extent.low = extent.high = double(values[0]);
        extend_floats(values, count, &extent);
    } else if (memory.dtype == kDouble) {
        auto* values = reinterpret_cast<const double*>(in_order);
        extent.low = extent.high = values[0];
        extend(values, count, &extent);
    } else if (memory.dtype == kHalf) {
        extend_decoded<of_half>(reinterpret_cast<const uint16_t*>(in_order), count, &extent);
    } else if (memory.dtype == kBFloat16) {
        extend_decoded<of_bfloat16>(reinterpret_cast<const uint16_t*>(in_order), count, &extent);
    } else {
        return false;
    }
    // Squares overflow, or vanish, where the norm does not.
    bool is_zero = extent.low == 0 && extent.high == 0;
    if (!std::isfinite(extent.squares) || (extent.squares < 1e-30 && !is_zero)) return false;
    norms->norm = float(std::sqrt(extent.squares));
    norms->largest = float(std::max(std::fabs(extent.low), std::fabs(extent.high)));
    norms->constant = extent.low == extent.high;
    return true;
}

}  // namespace amanda
