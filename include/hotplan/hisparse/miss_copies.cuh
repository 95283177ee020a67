/// \file miss_copies.cuh
/// \brief The copies that a block makes for the misses of a resolution.
#pragma once

#include <hotplan/hisparse/block.cuh>
#include <hotplan/hisparse/layout.h>

namespace hotplan::hisparse {

/// Copies of a block, and blocks of a launch, from which on sorting pays: 128 requests at 10 % of misses took 348 us
/// instead of 391, 8 requests at 100 % 203 instead of 213; but one request at 50 %, in eight blocks, 23.0 instead
/// of 21.8.
inline constexpr uint32_t kSortedCopies = 128;
inline constexpr uint32_t kSortedBlocks = 64;

/// Words that sort_copies counts in: the WarpTotals of a layout have room for them.
inline constexpr uint32_t kSortedParts = 4 * kWarp;
static_assert(sizeof(WarpTotals<uint64_t>) >= kSortedParts * sizeof(uint32_t));

/// Of the block among those of its set.
__device__ __forceinline__ uint32_t rank_of_block(const SetLaunch& launch) {
  return blockIdx.x & ((1u << launch.cluster_log2) - 1);
}

/// The memory of the block, for the launch's layouts.
template <Span kSpan>
__device__ __forceinline__ char* memory_of_block(const SetLaunch& launch) {
  if constexpr (kSpan != Span::kWide) return dynamic_shared();
  return launch.workspace + static_cast<int64_t>(blockIdx.x) * launch.layout.bytes;
}

/// What a block copies: every blocks-th miss, from that of its rank on. Where its arrays are follows from the launch:
/// to keep pointers to them takes registers, of which the copies have none to spare.
template <typename Source, Span kSpan>
struct MissCopies {
  static constexpr bool kMayBeDivided = kSpan == Span::kLoop && kHasClusters;

  const SetLaunch& launch;
  char* memory;  // of the block
  uint32_t count = 0;
  uint32_t loads = 0;    // misses that got a slot
  bool divided = false;  // what is known of a miss is at the number of the copy, not at that of the miss

  __device__ __forceinline__ void set(uint32_t copies, uint32_t misses_with_slots) {
    const uint32_t rank = rank_of_block(launch);
    count = copies > rank ? ((copies - rank - 1) >> launch.cluster_log2) + 1 : 0;
    loads = misses_with_slots;
  }
  __device__ __forceinline__ uint32_t miss(uint32_t n) const {
    return (n << launch.cluster_log2) + rank_of_block(launch);
  }
  __device__ __forceinline__ Source source(uint32_t n) const {
    const uint32_t offset = is_divided() ? launch.division.sources : launch.layout.sources;
    return reinterpret_cast<const Source*>(base() + offset)[is_divided() ? n : miss(n)];
  }
  __device__ __forceinline__ const uint16_t* victim(uint32_t n) const {
    const uint32_t offset = is_divided() ? launch.division.victims : launch.layout.victims;
    return reinterpret_cast<const uint16_t*>(base() + offset) + (is_divided() ? n : miss(n));
  }
  /// uint16 [count]: something that nobody asks for once everything has its place.
  __device__ __forceinline__ uint16_t* order() const {
    return reinterpret_cast<uint16_t*>(base() + (is_divided() ? launch.division.entries : launch.layout.slot_of));
  }
  /// uint32 [kSortedParts]
  __device__ __forceinline__ uint32_t* part_sizes() const {
    return reinterpret_cast<uint32_t*>(base() + (is_divided() ? launch.division.totals : launch.layout.totals));
  }

 private:
  __device__ __forceinline__ bool is_divided() const {
    return kMayBeDivided && divided;
  }
  __device__ __forceinline__ char* base() const {
    return kSpan == Span::kWide ? memory : dynamic_shared();
  }
};

/// 0, 1, ..., count - 1 into copies.order(), by which part of the `host_rows` rows the sources are in. Requests that
/// are resolved side by side then read from the same part of the pool at a time, and the GPU's address translation,
/// which holds only a part of it, finds more of what it needs.
template <typename Copies>
__device__ __forceinline__ void sort_copies(const Copies& copies, int64_t host_rows) {
  const float share = kSortedParts / static_cast<float>(host_rows);
  const auto part_of = [&](uint32_t n) {
    return min(kSortedParts - 1, static_cast<uint32_t>(static_cast<float>(copies.source(n)) * share));
  };
  uint32_t* const sizes = copies.part_sizes();
  if (threadIdx.x < kSortedParts) sizes[threadIdx.x] = 0;
  __syncthreads();  // nobody asks what was in the place of `order` any more, either
#pragma unroll 1
  for (uint32_t n = threadIdx.x; n < copies.count; n += kResolveThreads) atomicAdd(sizes + part_of(n), 1u);
  __syncthreads();
  if (threadIdx.x < kWarp) {
    uint32_t size[4];
    uint32_t own = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) own += size[i] = sizes[threadIdx.x * 4 + i];
    uint32_t next = warp_scan(own, threadIdx.x) - own;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      sizes[threadIdx.x * 4 + i] = next;
      next += size[i];
    }
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t n = threadIdx.x; n < copies.count; n += kResolveThreads) {
    copies.order()[atomicAdd(sizes + part_of(n), 1u)] = static_cast<uint16_t>(n);
  }
  __syncthreads();
}

/// The device row of miss m, whose victim is at `victim` if it got one.
template <typename Addressing>
__device__ __forceinline__ int32_t
row_of_miss(const Addressing& a, uint32_t m, uint32_t loads, const uint16_t* victim) {
  if constexpr (Addressing::kSpare) {
    if (m >= loads) return a.spare_row(m - loads);
  }
  return a.row_of_slot(*victim);
}

/// Of so many misses those that are copied: the ones that got a slot, and the ones that a spare row takes.
template <typename Addressing>
__device__ __forceinline__ uint32_t copied_misses(const Addressing& a, uint32_t misses, uint32_t loads) {
  if constexpr (Addressing::kSpare) return min(misses, loads + a.spare());
  return loads;
}

/// The list for Addressing::copy.
template <typename Addressing, Span kSpan>
struct MissList {
  const Addressing& a;
  const MissCopies<typename Addressing::Source, kSpan>& copies;
  bool sorted;

  __device__ __forceinline__ auto at(uint32_t n) const {
    if (sorted) n = copies.order()[n];
    return a.copy_of(copies.source(n), row_of_miss(a, copies.miss(n), copies.loads, copies.victim(n)));
  }
};

/// Makes the copies. All threads of the block call it, and may have stored what the copies need just before.
template <Span kSpan, typename Addressing>
__device__ __forceinline__ void copy_misses(
    const Addressing& a, const MissCopies<typename Addressing::Source, kSpan>& copies) {
  if (copies.count == 0) return;
  const bool sorted = kSpan != Span::kWide && copies.count >= kSortedCopies && gridDim.x >= kSortedBlocks;
  if (sorted) sort_copies(copies, a.host_rows());
  const MissList<Addressing, kSpan> list{a, copies, sorted};
  a.template copy<kSpan>(list, copies.count, threadIdx.x / kWarp, kResolveThreads / kWarp);
}

}  // namespace hotplan::hisparse
