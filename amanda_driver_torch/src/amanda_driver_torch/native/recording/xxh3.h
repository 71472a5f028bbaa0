// XXH3 with 64 bits and seed 0, the digest of fingerprints.
#pragma once

#include <cstddef>
#include <cstdint>

namespace amanda {

uint64_t xxh3(const void* data, size_t size);

}  // namespace amanda
