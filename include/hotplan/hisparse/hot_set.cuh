/// \file hot_set.cuh
/// \brief The set of pending ids: id -> the first column that names it. Open addressing, one compare-and-swap per id.
///
/// What a warp waits for is its slowest lane. Hence a roomy table, and a second hash that says how far to go from one
/// probe to the next: with eight entries per id a look-up that finds nothing ends after 1.1 probes, and after 2.5 for
/// the slowest of 32 lanes (neighbours as the next probe, in a table of four entries: 1.4 and 4.3).
#pragma once

#include <hotplan/hisparse/block.cuh>
#include <hotplan/hisparse/hash.h>
#include <hotplan/hisparse/layout.h>

namespace hotplan::hisparse {

template <typename Index>
struct HotSet {
  static constexpr int32_t kEmpty = -1;  // no id
  static constexpr uint32_t kNone = 0xFFFFFFFFu;

  int32_t* keys;   // [size]
  Index* columns;  // [size]
  uint32_t size;   // a power of two, at least twice the number of ids

  __device__ __forceinline__ void clear() const {
    const Pack<int32_t, 4> empty{{kEmpty, kEmpty, kEmpty, kEmpty}};
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < size / 4; i += kResolveThreads) pack_at<4>(keys, i) = empty;
  }

  /// Inserts the ids of columns `first`, `first + 1`, ..., except negative ones; the attempts for all of them are under
  /// way at once. `at` are their entries. Returns a bit for each id that was there already: the set then gives any of
  /// an id's columns, until the owners are sorted out.
  template <int N>
  __device__ __forceinline__ uint32_t insert(const int32_t (&id)[N], uint32_t first, uint32_t (&at)[N]) const {
    int32_t old[N];
    bool more = false;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      at[j] = home_of(id[j], size);
      old[j] = id[j] >= 0 ? atomicCAS(keys + at[j], kEmpty, id[j]) : kEmpty;
      more |= is_other(old[j], id[j]);
    }
    while (more) {
      more = false;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (!is_other(old[j], id[j])) continue;
        at[j] = next(at[j], id[j]);
        old[j] = atomicCAS(keys + at[j], kEmpty, id[j]);
        more |= is_other(old[j], id[j]);
      }
    }
    uint32_t known = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (id[j] < 0) continue;
      if (old[j] == kEmpty) columns[at[j]] = static_cast<Index>(first + j);
      known |= static_cast<uint32_t>(old[j] != kEmpty) << j;
    }
    return known;
  }

  /// For N numbers, which may be no ids at all, the columns or kNone. The first probes for all of them are under way at
  /// once; of those that need more, a lane rarely has two.
  template <int N>
  __device__ __forceinline__ void find(const int32_t (&id)[N], uint32_t (&column)[N]) const {
    uint32_t at[N];
    int32_t key[N];
    uint32_t more = 0;  // a bit per number
#pragma unroll
    for (int j = 0; j < N; ++j) {
      at[j] = home_of(id[j], size);
      key[j] = id[j] >= 0 ? keys[at[j]] : kEmpty;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) more |= static_cast<uint32_t>(is_other(key[j], id[j])) << j;
    while (more != 0) {
      const int which = __ffs(static_cast<int>(more)) - 1;
      int32_t wanted = id[0];
      uint32_t probe = at[0];
#pragma unroll
      for (int j = 1; j < N; ++j) {
        wanted = which == j ? id[j] : wanted;
        probe = which == j ? at[j] : probe;
      }
      probe = next(probe, wanted);
      const int32_t found = keys[probe];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        at[j] = which == j ? probe : at[j];
        key[j] = which == j ? found : key[j];
      }
      if (!is_other(found, wanted)) more &= more - 1;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) column[j] = key[j] != kEmpty ? columns[at[j]] : kNone;
  }

  /// Where the column of an id that is in the set stands.
  __device__ __forceinline__ Index* place_of(int32_t id) const {
    uint32_t at = home_of(id, size);
    while (keys[at] != id) at = next(at, id);
    return columns + at;
  }

 private:
  __device__ __forceinline__ static bool is_other(int32_t key, int32_t id) {
    return key != kEmpty && key != id;
  }
  /// Odd distances reach every entry of a table whose size is a power of two.
  __device__ __forceinline__ uint32_t next(uint32_t at, int32_t id) const {
    return (at + (static_cast<uint32_t>(id) * kHashFactor >> 7 | 1)) & (size - 1);
  }
};

}  // namespace hotplan::hisparse
