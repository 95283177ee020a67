/// \file block.cuh
/// \brief Vectors of any element, 16-bit atomics, and the scan over a block that costs one barrier.
#pragma once

#include <hotplan/hisparse/ptx.cuh>
#include <hotplan/platform.h>
#include <hotplan/warp.cuh>

namespace hotplan::hisparse {

/// What that lane of the warp has.
template <typename T>
__device__ __forceinline__ T* shuffle(T* pointer, uint32_t lane) {
  return reinterpret_cast<T*>(__shfl_sync(kFullMask, reinterpret_cast<unsigned long long>(pointer), lane));
}

/// N elements that are read and written at once.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T x[N];
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N>& pack_at(T* data, uint32_t index) {
  return reinterpret_cast<Pack<T, N>*>(data)[index];
}

/// Pack `index` of a row of `count` elements in global memory. Where the row is not aligned for vectors, or ends inside
/// the pack, element by element; -1 past the end.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* row, uint32_t index, uint32_t count, bool vector) {
  if (vector) [[likely]]
    return reinterpret_cast<const Pack<T, N>*>(row)[index];
  Pack<T, N> pack;
#pragma unroll
  for (uint32_t j = 0; j < N; ++j) pack.x[j] = index * N + j < count ? row[index * N + j] : static_cast<T>(-1);
  return pack;
}

template <int N, typename T>
__device__ __forceinline__ void store_pack(
    T* row, uint32_t index, uint32_t count, bool vector, const Pack<T, N>& pack) {
  if (vector) [[likely]] {
    reinterpret_cast<Pack<T, N>*>(row)[index] = pack;
    return;
  }
#pragma unroll
  for (uint32_t j = 0; j < N; ++j) {
    if (index * N + j < count) row[index * N + j] = pack.x[j];
  }
}

/// body(i) for this thread's share of [0, count), a run of neighbours, as a scan over the block needs them.
template <uint32_t kThreads, typename Body>
__device__ __forceinline__ void for_neighbours(uint32_t count, Body&& body) {
  const uint32_t each = div_ceil(count, kThreads);
  const uint32_t begin = threadIdx.x * each;
  const uint32_t end = min(begin + each, count);
#pragma unroll 1
  for (uint32_t i = begin; i < end; ++i) body(i);
}

__device__ __forceinline__ void atomic_min(uint32_t* at, uint32_t x) {
  atomicMin(at, x);
}
__device__ __forceinline__ void atomic_max(uint32_t* at, uint32_t x) {
  atomicMax(at, x);
}
__device__ __forceinline__ void atomic_min(uint16_t* at, uint32_t x) {
  for (uint16_t seen = *at; x < seen;) {
    const uint16_t before = atomicCAS(at, seen, static_cast<uint16_t>(x));
    if (before == seen) return;
    seen = before;
  }
}
__device__ __forceinline__ void atomic_max(uint16_t* at, uint32_t x) {
  for (uint16_t seen = *at; x > seen;) {
    const uint16_t before = atomicCAS(at, seen, static_cast<uint16_t>(x));
    if (before == seen) return;
    seen = before;
  }
}

/// Inclusive scan over the lanes of a warp.
template <typename T>
__device__ __forceinline__ T warp_scan(T x, uint32_t lane) {
#pragma unroll
  for (uint32_t step = 1; step < kWarp; step *= 2) {
    const T below = __shfl_up_sync(kFullMask, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

__device__ __forceinline__ uint32_t warp_sum(uint32_t x) {
  return __reduce_add_sync(kFullMask, x);
}
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (uint32_t step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}

/// Two counts in one word, so that one scan serves both: 16 bits each, or 32.
template <typename Word>
struct Pair {
  static constexpr uint32_t kShift = sizeof(Word) * 4;
  static constexpr Word kLow = (Word{1} << kShift) - 1;

  Word word = 0;

  __device__ __forceinline__ static Pair of(uint32_t first, uint32_t second) {
    return {static_cast<Word>(first) << kShift | second};
  }
  __device__ __forceinline__ uint32_t first() const {
    return static_cast<uint32_t>(word >> kShift);
  }
  __device__ __forceinline__ uint32_t second() const {
    return static_cast<uint32_t>(word & kLow);
  }
};

/// What a warp hands to the others.
template <typename Word>
struct WarpTotals {
  Word scan[kWarp];
  Word sum[kWarp];
};

template <typename Word>
struct Scanned {
  Pair<Word> before;  // sum over the threads before this one
  Pair<Word> total;
  Pair<Word> sum;  // total of the second value
};

/// Exclusive scan of `own` and sum of `other` over the block. Every warp scans the warps' totals for itself, which is
/// cheaper than another barrier. The barrier inside also separates what is before from what is after.
template <uint32_t kThreads, typename Word>
__device__ __forceinline__ Scanned<Word> block_scan(Pair<Word> own, Pair<Word> other, WarpTotals<Word>& totals) {
  constexpr uint32_t kWarps = kThreads / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  const Word inclusive = warp_scan(own.word, lane);
  const Word sum = warp_sum(other.word);
  if (lane == kWarp - 1) {
    totals.scan[warp] = inclusive;
    totals.sum[warp] = sum;
  }
  __syncthreads();
  // Three sums instead of another scan, which is five dependent steps.
  const Word total = lane < kWarps ? totals.scan[lane] : Word{0};
  Scanned<Word> result;
  result.before.word = inclusive - own.word + warp_sum(lane < warp ? total : Word{0});
  result.total.word = warp_sum(total);
  result.sum.word = warp_sum(lane < kWarps ? totals.sum[lane] : Word{0});
  return result;
}

}  // namespace hotplan::hisparse
