/// \file hot_set.cuh
/// \brief The set of pending ids: id -> the first column that names it.
///
/// A column claims its id's home by a plain store; the last one to store has it. After a barrier the others see whom
/// they lost to: an equal id, or another, and then the id goes to the spill, an open-addressing table that is filled by
/// compare-and-swap. With eight homes per id one in seventeen spills. A warp's compare-and-swap on shared memory takes
/// about 30 cycles, a store four: with such a table alone, inserting took a sixth of the whole resolution.
#pragma once

#include <hotplan/hisparse/block.cuh>
#include <hotplan/hisparse/hash.h>

namespace hotplan::hisparse {

template <typename Index>
struct HotSet {
  static constexpr Index kNobody = static_cast<Index>(~Index{0});
  static constexpr int32_t kEmpty = -1;  // no id
  static constexpr uint32_t kNone = 0xFFFFFFFFu;

  const int32_t* ids;  // by column
  Index* homes;        // [home_count], a column each
  uint32_t home_count;
  int32_t* keys;        // [spill_size], ids
  Index* columns;       // [spill_size]
  uint32_t spill_size;  // a power of two, more than there are ids

  template <uint32_t kThreads>
  __device__ __forceinline__ void clear() const {
    constexpr uint32_t kEach = 16 / sizeof(Index);
    Pack<Index, kEach> nobody;
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) nobody.x[j] = kNobody;
    const Pack<int32_t, 4> empty{{kEmpty, kEmpty, kEmpty, kEmpty}};
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < home_count / kEach; i += kThreads) pack_at<kEach>(homes, i) = nobody;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < spill_size / 4; i += kThreads) pack_at<4>(keys, i) = empty;
  }

  /// Claims the homes of the ids of columns `first`, `first + 1`, ..., except negative ones.
  template <int N>
  __device__ __forceinline__ void claim(const int32_t (&id)[N], uint32_t first) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (id[j] >= 0) homes[home_of(id[j], home_count)] = static_cast<Index>(first + j);
    }
  }

  /// A barrier later: sends what has lost its home to the spill. Returns whether another column names one of the ids;
  /// the set then gives any of an id's columns, until the owners are sorted out.
  template <int N>
  __device__ __forceinline__ bool settle(const int32_t (&id)[N], uint32_t first) const {
    uint32_t winner[N];
#pragma unroll
    for (int j = 0; j < N; ++j) winner[j] = id[j] >= 0 ? homes[home_of(id[j], home_count)] : first + j;
    bool duplicate = false;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (winner[j] == first + j) continue;
      duplicate |= ids[winner[j]] == id[j] || spill(id[j], first + j);
    }
    return duplicate;
  }

  /// For N numbers, which may be no ids at all, the columns or kNone. The look-ups for all of them are under way at
  /// once.
  template <int N>
  __device__ __forceinline__ void find(const int32_t (&id)[N], uint32_t (&column)[N]) const {
    uint32_t resident[N];
    int32_t resident_id[N];
#pragma unroll
    for (int j = 0; j < N; ++j) resident[j] = id[j] >= 0 ? homes[home_of(id[j], home_count)] : kNobody;
#pragma unroll
    for (int j = 0; j < N; ++j) resident_id[j] = resident[j] != kNobody ? ids[resident[j]] : kEmpty;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      column[j] = resident[j] != kNobody ? resident[j] : kNone;
      if (resident[j] != kNobody && resident_id[j] != id[j]) column[j] = find_spilled(id[j]);
    }
  }

  /// Where the column of an id that is in the set stands.
  __device__ __forceinline__ Index* place_of(int32_t id) const {
    Index* const home = homes + home_of(id, home_count);
    if (ids[*home] == id) return home;
    uint32_t at = spilled_at(id);
    while (keys[at] != id) at = next(at);
    return columns + at;
  }

 private:
  /// Bits that the home has not used: ids of one home part here.
  __device__ __forceinline__ uint32_t spilled_at(int32_t id) const {
    return static_cast<uint32_t>(id) * kHashFactor >> 5 & (spill_size - 1);
  }
  __device__ __forceinline__ uint32_t next(uint32_t at) const {
    return (at + 1) & (spill_size - 1);
  }

  __device__ __forceinline__ bool spill(int32_t id, uint32_t column) const {
    uint32_t at = spilled_at(id);
    int32_t old = atomicCAS(keys + at, kEmpty, id);
    while (old != kEmpty && old != id) {
      at = next(at);
      old = atomicCAS(keys + at, kEmpty, id);
    }
    if (old == kEmpty) columns[at] = static_cast<Index>(column);
    return old != kEmpty;
  }

  __device__ __forceinline__ uint32_t find_spilled(int32_t id) const {
    uint32_t at = spilled_at(id);
    int32_t key = keys[at];
    while (key != kEmpty && key != id) {
      at = next(at);
      key = keys[at];
    }
    return key == id ? columns[at] : kNone;
  }
};

}  // namespace hotplan::hisparse
