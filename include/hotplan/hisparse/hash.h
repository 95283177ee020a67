/// \file hash.h
/// \brief id -> home in a table.
#pragma once

#include <hotplan/platform.h>

namespace hotplan::hisparse {

inline constexpr uint32_t kHashFactor = 0x9E3779B1u;

/// Where the search for an id begins in a table of `size` entries, which need not be a power of two: the id times 2^32
/// over the golden ratio, of which the high bits count. Every bit of an id reaches them, and ids at equal distances,
/// which share their low bits, are spread as evenly as can be (Knuth, volume 3, section 6.4).
HOTPLAN_HD uint32_t home_of(int32_t id, uint32_t size) {
  const uint32_t mixed = static_cast<uint32_t>(id) * kHashFactor;
#ifdef __CUDA_ARCH__
  return __umulhi(mixed, size);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(mixed) * size) >> 32);
#endif
}

}  // namespace hotplan::hisparse
