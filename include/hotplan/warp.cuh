/// \file warp.cuh
/// \brief What the kernels of all families say about warps.
#pragma once

#include <cstdint>

namespace hotplan {

inline constexpr uint32_t kWarp = 32;
inline constexpr uint32_t kFullMask = 0xFFFFFFFFu;

/// The last of `count` ascending starts that is not behind `n`; `start_of(i)` is the i-th.
template <typename StartOf>
__device__ __forceinline__ uint32_t last_not_behind(uint32_t count, uint32_t n, StartOf&& start_of) {
  uint32_t low = 0;
  for (uint32_t size = count; size > 1;) {
    const uint32_t half = size / 2;
    low += start_of(low + half) <= n ? half : 0;
    size -= half;
  }
  return low;
}

}  // namespace hotplan
