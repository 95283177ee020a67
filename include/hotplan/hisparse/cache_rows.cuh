/// \file cache_rows.cuh
/// \brief The pieces of rows that go from the host pool to the hot cache.
#pragma once

#include <hotplan/hisparse/copy.cuh>
#include <hotplan/hisparse/rules.h>

namespace hotplan::hisparse {

/// Pieces of rows that a list names: rows.at(n) is a RowCopy.
template <typename List>
struct CacheRows {
  const Caches& caches;
  List list;

  __device__ __forceinline__ Piece piece(uint32_t n, uint32_t byte) const {
    const RowCopy copy = list.at(n);
    const char* const from = caches.host + copy.host_row * caches.row_bytes + byte;
    return {
        copy.host_row < caches.host_rows ? from : nullptr,
        copy.wanted(caches) ? caches.hot + hot_offset(caches, static_cast<uint32_t>(copy.hot_row)) + byte : nullptr};
  }
};

}  // namespace hotplan::hisparse
