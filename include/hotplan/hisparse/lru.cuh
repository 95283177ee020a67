/// \file lru.cuh
/// \brief An LRU row in a block's memory: marks by slot, and repair.
///
/// The row comes in by position, what the slots hold by slot, and they meet in flags by slot, so no thread loads state
/// that depends on other state. The flags are also the proof that the order is a permutation: H positions that leave no
/// slot unmarked name each of the H slots once.
#pragma once

#include <hotplan/hisparse/block.cuh>
#include <hotplan/hisparse/layout.h>
#include <hotplan/hisparse/lru.h>

namespace hotplan::hisparse {

struct Lru {
  uint32_t slots;         // H
  uint16_t* order;        // [H], slot by position; arrays are padded to whole packs
  uint16_t* position_of;  // [H], position by slot, in a repair
  uint8_t* flags;         // [H], by slot

  /// No slot has this number.
  static constexpr uint16_t kNoSlot = 0xFFFF;

  __device__ __forceinline__ static uint16_t checked(int16_t slot) {
    return static_cast<uint16_t>(slot);  // negative ones become too large
  }
  __device__ __forceinline__ static uint16_t checked(int32_t slot) {
    return slot >= 0 && slot < kNoSlot ? static_cast<uint16_t>(slot) : kNoSlot;
  }

  /// The flags of a pack of slots.
  __device__ __forceinline__ uint32_t& marks(uint32_t pack) const {
    return reinterpret_cast<uint32_t*>(flags)[pack];
  }
  /// What they are if each slot is marked.
  __device__ __forceinline__ uint32_t all_marks(uint32_t pack) const {
    const uint32_t left = slots - pack * kSlotPack;
    return left >= kSlotPack ? 0x01010101u : 0x01010101u >> (32 - 8 * left);
  }

  __device__ __forceinline__ void clear_flags() const {
    for (uint32_t i = threadIdx.x; i < div_ceil(slots, kSlotPack); i += kResolveThreads) marks(i) = 0;
  }

  /// position_of, where the order is a permutation.
  __device__ __forceinline__ void invert() const {
#pragma unroll 1
    for (uint32_t p = threadIdx.x; p < slots; p += kResolveThreads) position_of[order[p]] = static_cast<uint16_t>(p);
  }

  /// Makes the order a permutation and inverts it: the most recent occurrence of a slot counts, missing slots come back
  /// as the oldest.
  template <typename Word>
  __device__ __forceinline__ void repair(WarpTotals<Word>& totals) const {
    constexpr uint8_t kKept = 1;     // of a position
    constexpr uint8_t kMissing = 2;  // of a slot
#pragma unroll 1
    for (uint32_t slot = threadIdx.x; slot < slots; slot += kResolveThreads) position_of[slot] = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t p = threadIdx.x; p < slots; p += kResolveThreads) {
      if (order[p] < slots) atomic_max(position_of + order[p], p + 1);
    }
    __syncthreads();
    uint32_t kept = 0;
    uint32_t missing = 0;
    for_neighbours<kResolveThreads>(slots, [&](uint32_t p) {
      const bool keeps = order[p] < slots && position_of[order[p]] == p + 1;
      const bool misses = position_of[p] == 0;
      flags[p] = (keeps ? kKept : 0) | (misses ? kMissing : 0);
      kept += keeps;
      missing += misses;
    });
    const auto scanned = block_scan<kResolveThreads>(Pair<Word>::of(kept, missing), Pair<Word>{}, totals);
    uint32_t next_missing = scanned.before.second();
    uint32_t next_kept = scanned.total.second() + scanned.before.first();
    for_neighbours<kResolveThreads>(slots, [&](uint32_t p) {
      if (flags[p] & kKept) position_of[order[p]] = static_cast<uint16_t>(next_kept++);
      if (flags[p] & kMissing) position_of[p] = static_cast<uint16_t>(next_missing++);
    });
    __syncthreads();
#pragma unroll 1
    for (uint32_t slot = threadIdx.x; slot < slots; slot += kResolveThreads) {
      order[position_of[slot]] = static_cast<uint16_t>(slot);
    }
    __syncthreads();
  }
};

}  // namespace hotplan::hisparse
