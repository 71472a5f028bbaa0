// Follows the specification of xxHash by Yann Collet, which has the constants
// (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). Tests compare it with the
// package `xxhash`.
#include "recording/xxh3.h"

#include <cstddef>
#include <cstring>

#if defined(_MSC_VER)
#include <intrin.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define AMANDA_AVX2
#include <immintrin.h>
#endif

namespace amanda {

namespace {

constexpr uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F,
                   P64_3 = 0x165667B19E3779F9, P64_4 = 0x85EBCA77C2B2AE63,
                   P64_5 = 0x27D4EB2F165667C5;
// Bytes of a stripe, stripes of a block, bytes of a block.
constexpr size_t STRIPE = 64, STRIPES = (sizeof SECRET - STRIPE) / 8, BLOCK = STRIPE * STRIPES;

// The machine is little-endian: those that torch supports are.
inline uint64_t read_64(const uint8_t* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

inline uint32_t read_32(const uint8_t* at) {
    uint32_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

inline uint64_t folded_product(uint64_t a, uint64_t b) {
#if defined(_MSC_VER)
    uint64_t high, low = _umul128(a, b, &high);
    return low ^ high;
#else
    __extension__ typedef unsigned __int128 Wide;
    Wide product = Wide(a) * b;
    return uint64_t(product) ^ uint64_t(product >> 64);
#endif
}

inline uint64_t swapped(uint64_t x) {
    x = ((x & 0x00FF00FF00FF00FF) << 8) | ((x >> 8) & 0x00FF00FF00FF00FF);
    x = ((x & 0x0000FFFF0000FFFF) << 16) | ((x >> 16) & 0x0000FFFF0000FFFF);
    return (x << 32) | (x >> 32);
}

inline uint64_t rotated(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

inline uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9;
    return hash ^ (hash >> 32);
}

inline uint64_t older_avalanche(uint64_t hash) {
    hash = (hash ^ (hash >> 33)) * P64_2;
    hash = (hash ^ (hash >> 29)) * P64_3;
    return hash ^ (hash >> 32);
}

inline uint64_t mix_16(const uint8_t* data, const uint8_t* secret) {
    return folded_product(read_64(data) ^ read_64(secret), read_64(data + 8) ^ read_64(secret + 8));
}

uint64_t up_to_16(const uint8_t* data, size_t size) {
    if (size > 8) {
        uint64_t low = read_64(data) ^ read_64(SECRET + 24) ^ read_64(SECRET + 32);
        uint64_t high = read_64(data + size - 8) ^ read_64(SECRET + 40) ^ read_64(SECRET + 48);
        return avalanche(size + swapped(low) + high + folded_product(low, high));
    }
    if (size >= 4) {
        uint64_t both = read_32(data + size - 4) + (uint64_t(read_32(data)) << 32);
        uint64_t hash = both ^ read_64(SECRET + 8) ^ read_64(SECRET + 16);
        hash = (hash ^ rotated(hash, 49) ^ rotated(hash, 24)) * 0x9FB21C651E98DF25;
        hash = (hash ^ ((hash >> 35) + size)) * 0x9FB21C651E98DF25;
        return hash ^ (hash >> 28);
    }
    if (size != 0) {
        uint32_t all = (uint32_t(data[0]) << 16) | (uint32_t(data[size >> 1]) << 24) |
                       data[size - 1] | (uint32_t(size) << 8);
        return older_avalanche(uint64_t(all) ^ (read_32(SECRET) ^ read_32(SECRET + 4)));
    }
    return older_avalanche(read_64(SECRET + 56) ^ read_64(SECRET + 64));
}

uint64_t up_to_240(const uint8_t* data, size_t size) {
    uint64_t hash = size * P64_1;
    if (size <= 128) {
        for (size_t i = (size - 1) / 32 + 1; i-- > 0;) {
            hash += mix_16(data + 16 * i, SECRET + 32 * i);
            hash += mix_16(data + size - 16 * (i + 1), SECRET + 32 * i + 16);
        }
        return avalanche(hash);
    }
    for (size_t i = 0; i < 8; ++i) hash += mix_16(data + 16 * i, SECRET + 16 * i);
    hash = avalanche(hash);
    for (size_t i = 8; i < size / 16; ++i) {
        hash += mix_16(data + 16 * i, SECRET + 16 * (i - 8) + 3);
    }
    return avalanche(hash + mix_16(data + size - 16, SECRET + 136 - 17));
}

struct Lanes {
    alignas(32) uint64_t lane[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
};

constexpr const uint8_t* LAST_SECRET = SECRET + sizeof SECRET - STRIPE;

void add_stripes(Lanes& lanes, const uint8_t* data, const uint8_t* secret, size_t count) {
    for (; count != 0; --count, data += STRIPE, secret += 8) {
        for (size_t i = 0; i < 8; ++i) {
            uint64_t value = read_64(data + 8 * i), key = value ^ read_64(secret + 8 * i);
            lanes.lane[i ^ 1] += value;
            lanes.lane[i] += (key & 0xFFFFFFFF) * (key >> 32);
        }
    }
}

// Adds all blocks and stripes but the last stripe.
void add_all(Lanes& lanes, const uint8_t* data, size_t size) {
    for (; size > BLOCK; size -= BLOCK, data += BLOCK) {
        add_stripes(lanes, data, SECRET, STRIPES);
        for (size_t i = 0; i < 8; ++i) {
            uint64_t& lane = lanes.lane[i];
            lane = (lane ^ (lane >> 47) ^ read_64(LAST_SECRET + 8 * i)) * P32_1;
        }
    }
    add_stripes(lanes, data, SECRET, (size - 1) / STRIPE);
}

#if defined(AMANDA_AVX2)
#define AMANDA_WIDE __attribute__((target("avx2"), always_inline)) inline

AMANDA_WIDE __m256i wide(const uint8_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

AMANDA_WIDE __m256i with_half(__m256i sum, const uint8_t* data, const uint8_t* secret) {
    __m256i value = wide(data), key = _mm256_xor_si256(value, wide(secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    __m256i other = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(sum, other));
}

// Adds a stripe, and asks for the one that is so many bytes ahead.
AMANDA_WIDE void add_stripe(__m256i& low, __m256i& high, const uint8_t* data,
                            const uint8_t* secret, size_t ahead) {
    _mm_prefetch(reinterpret_cast<const char*>(data) + ahead, _MM_HINT_T0);
    low = with_half(low, data, secret);
    high = with_half(high, data + 32, secret + 32);
}

AMANDA_WIDE __m256i scrambled(__m256i lane, const uint8_t* secret) {
    const __m256i prime = _mm256_set1_epi32(int(P32_1));
    lane = _mm256_xor_si256(lane, _mm256_srli_epi64(lane, 47));
    lane = _mm256_xor_si256(lane, wide(secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lane, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lane, prime), _mm256_slli_epi64(high, 32));
}

// Bytes from which data are hardly in the nearest cache.
constexpr size_t FAR = 1 << 16;

__attribute__((target("avx2"))) void add_all_avx2(Lanes& lanes, const uint8_t* data, size_t size) {
    auto* own = reinterpret_cast<__m256i*>(lanes.lane);
    __m256i low = own[0], high = own[1];
    // What lies in main memory is read twice as fast if it is asked for early. A prefetch may go
    // beyond the memory.
    const size_t ahead = size < FAR ? 512 : 4096;
    for (;; size -= BLOCK) {
        const bool more = size > BLOCK;
        const uint8_t *secret = SECRET, *end = data + (more ? BLOCK : (size - 1) / STRIPE * STRIPE);
        // Four at a time spare the steps of the pointers.
        for (; end - data >= std::ptrdiff_t(4 * STRIPE); data += 4 * STRIPE, secret += 4 * 8) {
            add_stripe(low, high, data, secret, ahead);
            add_stripe(low, high, data + STRIPE, secret + 8, ahead);
            add_stripe(low, high, data + 2 * STRIPE, secret + 2 * 8, ahead);
            add_stripe(low, high, data + 3 * STRIPE, secret + 3 * 8, ahead);
        }
        for (; data != end; data += STRIPE, secret += 8) {
            add_stripe(low, high, data, secret, ahead);
        }
        if (!more) break;
        low = scrambled(low, LAST_SECRET);
        high = scrambled(high, LAST_SECRET + 32);
    }
    own[0] = low;
    own[1] = high;
}
#endif

using AddAll = void (*)(Lanes&, const uint8_t*, size_t);

AddAll fastest() {
#if defined(AMANDA_AVX2)
    if (__builtin_cpu_supports("avx2")) return add_all_avx2;
#endif
    return add_all;
}

uint64_t above_240(const uint8_t* data, size_t size) {
    static const AddAll add = fastest();
    Lanes lanes;
    add(lanes, data, size);
    add_stripes(lanes, data + size - STRIPE, LAST_SECRET - 7, 1);
    uint64_t hash = size * P64_1;
    for (size_t i = 0; i < 4; ++i) {
        hash += folded_product(lanes.lane[2 * i] ^ read_64(SECRET + 11 + 16 * i),
                               lanes.lane[2 * i + 1] ^ read_64(SECRET + 19 + 16 * i));
    }
    return avalanche(hash);
}

}  // namespace

uint64_t xxh3(const void* given, size_t size) {
    auto* data = static_cast<const uint8_t*>(given);
    if (size <= 16) return up_to_16(data, size);
    return size <= 240 ? up_to_240(data, size) : above_240(data, size);
}

}  // namespace amanda
