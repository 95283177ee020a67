/// \file cache_rows.cuh
/// \brief Rows that go from the host pool to the hot cache.
#pragma once

#include <hotplan/hisparse/copy.cuh>
#include <hotplan/hisparse/rules.h>

namespace hotplan::hisparse {

struct CacheRow {
  const char* from;  // nullptr: there is no such row, zeros are written
  char* to;          // nullptr: nothing is written
};

/// What that lane of the warp has.
__device__ __forceinline__ CacheRow of_lane(const CacheRow& row, uint32_t lane) {
  return {shuffle(row.from, lane), shuffle(row.to, lane)};
}

/// Rows that a list names: list.at(n) is a RowCopy.
template <typename List>
struct CacheRows {
  const Caches& caches;
  List list;

  __device__ __forceinline__ CacheRow row(uint32_t n) const {
    const RowCopy copy = list.at(n);
    if (!copy.wanted(caches)) return {nullptr, nullptr};
    return {
        copy.host_row < caches.host_rows ? caches.host + copy.host_row * caches.row_bytes : nullptr,
        caches.hot + hot_offset(caches, static_cast<uint32_t>(copy.hot_row))};
  }

  __device__ __forceinline__ Piece piece(const CacheRow& row, uint32_t byte) const {
    return {row.from ? row.from + byte : nullptr, row.to ? row.to + byte : nullptr};
  }
};

}  // namespace hotplan::hisparse
