/// \file platform.h
/// \brief The few words that let one function serve g++, nvcc's host pass and nvcc's device pass.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HOTPLAN_HD __host__ __device__ __forceinline__
#else
#define HOTPLAN_HD inline
#endif

namespace hotplan {

template <typename T>
HOTPLAN_HD constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
HOTPLAN_HD constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

template <typename T>
HOTPLAN_HD constexpr T clamp_to(T x, T low, T high) {
  return min_of(max_of(x, low), high);
}

template <typename T>
HOTPLAN_HD constexpr T div_ceil(T a, T b) {
  return (a + b - 1) / b;
}

inline constexpr int64_t kMaxInt32 = 0x7FFFFFFF;

/// The final step of every address: what does not fit an int32 field, or is no address at all, is -1.
HOTPLAN_HD constexpr int32_t fit_int32(int64_t x) {
  return x >= 0 && x <= kMaxInt32 ? static_cast<int32_t>(x) : -1;
}

/// Division of a non-negative int32 by a divisor known at launch: a multiply and a shift, where the GPU's integer
/// division is a subroutine of about 20 instructions (Granlund and Montgomery, PLDI 1994, figure 4.1, for n < 2^31).
struct FastDiv {
  uint32_t divisor = 1;
  uint32_t magic = 1;
  uint32_t shift = 0;

  FastDiv() = default;
  explicit FastDiv(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    magic = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }

  HOTPLAN_HD uint32_t div(uint32_t n) const {
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(n, magic);
#else
    const auto high = static_cast<uint32_t>((static_cast<uint64_t>(n) * magic) >> 32);
#endif
    return (high + n) >> shift;
  }
  HOTPLAN_HD uint32_t mod(uint32_t n) const {
    return n - div(n) * divisor;
  }
};

}  // namespace hotplan
