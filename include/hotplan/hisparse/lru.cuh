/// \file lru.cuh
/// \brief An LRU row in a block's memory: its order, which positions are hit, the new order, and repair.
///
/// The row comes in by position, what the slots hold by slot; the inverse of the order brings both together, so no
/// thread loads state that depends on other state. The inverse is also the proof that the order is a permutation: H
/// positions that leave no slot out name each of the H slots once.
#pragma once

#include <hotplan/hisparse/block.cuh>
#include <hotplan/hisparse/lru.h>

namespace hotplan::hisparse {

template <uint32_t kThreads>
struct Lru {
  static constexpr uint32_t kPack = 8;
  static constexpr uint16_t kNowhere = 0xFFFF;

  uint32_t slots;         // H
  uint16_t* order;        // [H], slot by position; arrays are padded to whole packs
  uint16_t* position_of;  // [H], position by slot
  uint8_t* hit_at;        // [H], 1 where the position's slot is hit

  __device__ __forceinline__ uint32_t packs() const {
    return div_ceil(slots, kPack);
  }

  __device__ __forceinline__ void clear() const {
    for (uint32_t i = threadIdx.x; i < packs(); i += kThreads) {
      Pack<uint16_t, kPack> nowhere;
#pragma unroll
      for (uint32_t j = 0; j < kPack; ++j) nowhere.x[j] = kNowhere;
      pack_at<kPack>(position_of, i) = nowhere;
    }
    clear_hits();
  }

  __device__ __forceinline__ void clear_hits() const {
    const Pack<uint32_t, 2> none{{0, 0}};
    auto* const words = reinterpret_cast<uint32_t*>(hit_at);
    for (uint32_t i = threadIdx.x; i < packs(); i += kThreads) pack_at<2>(words, i) = none;
  }

  /// Asks for the row, into `order`. `shared`: that is shared memory; `vector`: see load_pack.
  __device__ __forceinline__ void load(const int16_t* row, bool shared, bool vector) const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < packs(); i += kThreads) {
      if (shared && vector) {
        async_copy_16(order + i * kPack, row + i * kPack);
      } else {
        pack_at<kPack>(reinterpret_cast<int16_t*>(order), i) = load_pack<kPack>(row, i, slots, vector);
      }
    }
  }

  /// Inverts the order, each thread the packs that it has loaded. Slots that do not exist have no place in the inverse.
  __device__ __forceinline__ void invert() const {
    async_wait();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < packs(); i += kThreads) {
      const Pack<uint16_t, kPack> slot = pack_at<kPack>(order, i);
#pragma unroll
      for (uint32_t j = 0; j < kPack; ++j) {
        if (slot.x[j] < slots) position_of[slot.x[j]] = static_cast<uint16_t>(i * kPack + j);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------ own positions
  // For scans a thread has a run of neighbouring packs.

  template <typename Body>
  __device__ __forceinline__ void for_own_packs(Body&& body) const {
    const uint32_t each = div_ceil(packs(), kThreads);
    const uint32_t begin = threadIdx.x * each;
    const uint32_t end = min(begin + each, packs());
#pragma unroll 1
    for (uint32_t i = begin; i < end; ++i) body(i);
  }

  __device__ __forceinline__ uint32_t count_hits() const {
    uint32_t count = 0;
    for_own_packs([&](uint32_t i) {
      const Pack<uint32_t, 2> hits = pack_at<2>(reinterpret_cast<uint32_t*>(hit_at), i);
      count += __popc(hits.x[0]) + __popc(hits.x[1]);
    });
    return count;
  }

  /// Writes the own positions' part of the new order, and the victims that take misses.
  __device__ __forceinline__ void partition(
      const Partition& target, uint32_t hits_before, uint16_t* new_order, uint16_t* victims) const {
    for_own_packs([&](uint32_t i) {
      const Pack<uint16_t, kPack> slot = pack_at<kPack>(order, i);
      const Pack<uint8_t, kPack> hit = pack_at<kPack>(hit_at, i);
#pragma unroll
      for (uint32_t j = 0; j < kPack; ++j) {
        const uint32_t p = i * kPack + j;
        const uint32_t v = p - hits_before;
        if (p < slots) new_order[hit.x[j] ? target.of_hit(hits_before) : target.of_victim(v)] = slot.x[j];
        if (p < slots && !hit.x[j] && v < target.loads) victims[v] = slot.x[j];
        hits_before += hit.x[j];
      }
    });
  }

  /// Makes the order a permutation: the most recent occurrence of a slot counts, missing slots come back as the oldest.
  template <typename Word>
  __device__ __forceinline__ void repair(WarpTotals<Word>& totals) const {
    constexpr uint8_t kKept = 1;     // of a position
    constexpr uint8_t kMissing = 2;  // of a slot
#pragma unroll 1
    for (uint32_t slot = threadIdx.x; slot < slots; slot += kThreads) position_of[slot] = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t p = threadIdx.x; p < slots; p += kThreads) {
      if (order[p] < slots) atomic_max(position_of + order[p], p + 1);
    }
    __syncthreads();
    uint32_t kept = 0;
    uint32_t missing = 0;
    for_own_packs([&](uint32_t i) {
#pragma unroll 1
      for (uint32_t p = i * kPack; p < min((i + 1) * kPack, slots); ++p) {
        const bool keeps = order[p] < slots && position_of[order[p]] == p + 1;
        const bool misses = position_of[p] == 0;
        hit_at[p] = (keeps ? kKept : 0) | (misses ? kMissing : 0);
        kept += keeps;
        missing += misses;
      }
    });
    const auto scanned = block_scan<kThreads>(Pair<Word>::of(kept, missing), Pair<Word>{}, totals);
    uint32_t next_missing = scanned.before.second();
    uint32_t next_kept = scanned.total.second() + scanned.before.first();
    for_own_packs([&](uint32_t i) {
#pragma unroll 1
      for (uint32_t p = i * kPack; p < min((i + 1) * kPack, slots); ++p) {
        if (hit_at[p] & kKept) position_of[order[p]] = static_cast<uint16_t>(next_kept++);
        if (hit_at[p] & kMissing) position_of[p] = static_cast<uint16_t>(next_missing++);
      }
    });
    __syncthreads();
#pragma unroll 1
    for (uint32_t slot = threadIdx.x; slot < slots; slot += kThreads) {
      order[position_of[slot]] = static_cast<uint16_t>(slot);
    }
    __syncthreads();
  }
};

}  // namespace hotplan::hisparse
