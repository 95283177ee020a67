/// \file hot_set.cuh
/// \brief The set of pending ids: id -> the first column that names it. Open addressing, one compare-and-swap per id.
///
/// Simulated for 2,048 ids: a table of four entries per id needs 1.2 probes to insert and 1.4 to find nothing, for
/// random ids and for multiples of 4,096 alike, and 4.3 for the slowest lane of a warp; half the table needs 1.5, 2.5
/// and 10 to 12.
#pragma once

#include <hotplan/hisparse/block.cuh>
#include <hotplan/hisparse/rules.h>

namespace hotplan::hisparse {

template <typename Index>
struct HotSet {
  static constexpr int32_t kEmpty = -1;  // no id
  static constexpr uint32_t kNone = 0xFFFFFFFFu;

  int32_t* keys;   // [size]
  Index* columns;  // [size]
  uint32_t size;   // a multiple of 4, at least twice the number of ids

  template <uint32_t kThreads>
  __device__ __forceinline__ void clear() const {
    const Pack<int32_t, 4> empty{{kEmpty, kEmpty, kEmpty, kEmpty}};
    for (uint32_t i = threadIdx.x; i < size / 4; i += kThreads) pack_at<4>(keys, i) = empty;
  }

  /// Inserts the ids of columns `first`, `first + stride`, ..., except negative ones. Returns whether another column
  /// has named one of them before; `columns` then holds any of its columns, until the owners are sorted out. The first
  /// attempts are all under way at once.
  template <int N>
  __device__ __forceinline__ bool insert(const int32_t (&id)[N], uint32_t first, uint32_t stride) const {
    uint32_t at[N];
    int32_t old[N];
    bool known = false;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      at[j] = home_of(id[j], size);
      if (id[j] >= 0) old[j] = atomicCAS(keys + at[j], kEmpty, id[j]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (id[j] < 0) continue;
      while (old[j] != kEmpty && old[j] != id[j]) {
        at[j] = next(at[j]);
        old[j] = atomicCAS(keys + at[j], kEmpty, id[j]);
      }
      if (old[j] == kEmpty) {
        columns[at[j]] = static_cast<Index>(first + j * stride);
      } else {
        known = true;
      }
    }
    return known;
  }

  /// The entry of an id that was inserted.
  __device__ __forceinline__ uint32_t entry_of(int32_t id) const {
    uint32_t at = home_of(id, size);
    while (keys[at] != id) at = next(at);
    return at;
  }

  /// For N numbers, which may be no ids at all, the columns or kNone. The first probes are all under way at once.
  template <int N>
  __device__ __forceinline__ void find(const int32_t (&id)[N], uint32_t (&column)[N]) const {
    uint32_t at[N];
    int32_t key[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      at[j] = id[j] >= 0 ? home_of(id[j], size) : 0;
      key[j] = id[j] >= 0 ? keys[at[j]] : kEmpty;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      while (key[j] != id[j] && key[j] != kEmpty) {
        at[j] = next(at[j]);
        key[j] = keys[at[j]];
      }
      column[j] = key[j] != kEmpty ? columns[at[j]] : kNone;
    }
  }

 private:
  __device__ __forceinline__ uint32_t next(uint32_t at) const {
    return at + 1 == size ? 0 : at + 1;
  }
};

}  // namespace hotplan::hisparse
