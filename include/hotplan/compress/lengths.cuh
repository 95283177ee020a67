/// \file lengths.cuh
/// \brief Where a kernel reads its lengths: from global memory, or from its own parameters.
///
/// Lengths on the CPU travel inside the launch (a kernel takes up to 32,764 bytes of parameters), so there is no pinned
/// buffer to fill, no copy to wait for and nothing to keep alive until the kernel has run.
#pragma once

#include <hotplan/compress/params.h>

#include <cstring>

namespace hotplan::compress {

struct LengthPair {
  int64_t seq;
  int64_t extend;
};

inline constexpr uint32_t kUnlimited = 0xFFFFFFFFu;

struct GlobalLengths {
  static constexpr uint32_t kCapacity = kUnlimited;
  const int64_t* seq;
  const int64_t* extend;

  __device__ __forceinline__ LengthPair operator[](uint32_t i) const {
    return {seq[i], extend ? extend[i] : 0};
  }
};

/// A copy that stays in registers. Without the empty asm the compiler fetches each field from constant memory again
/// wherever it is used: with an index that depends on the block a load of about 30 cycles, a dozen in a row.
template <typename T>
__device__ __forceinline__ T in_registers(const T& value) {
  static_assert(sizeof(T) % 4 == 0);
  constexpr int kWords = sizeof(T) / 4;
  uint32_t words[kWords];
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(words[i]));
  T copy;
  memcpy(&copy, words, sizeof(T));
  return copy;
}

/// Checked lengths fit an int32. The two of a request are adjacent: one constant load.
template <uint32_t N>
struct InlineLengths {
  static constexpr uint32_t kCapacity = N;
  int2 pair[N];

  __device__ __forceinline__ LengthPair operator[](uint32_t i) const {
    return {pair[i].x, pair[i].y};
  }
};

}  // namespace hotplan::compress
