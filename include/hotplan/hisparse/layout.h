/// \file layout.h
/// \brief A block's memory in a resolution: which arrays, how large, and whether they fit into shared memory.
#pragma once

#include <hotplan/platform.h>

namespace hotplan::hisparse {

inline constexpr uint32_t kResolveThreads = 1024;

/// References of a run that 16-bit indices can count, with room for "none" and for a mark.
inline constexpr uint32_t kMaxNarrowReferences = 32767;

/// Byte offsets. Sizes are for the largest run that a launch can have.
struct ResolveLayout {
  uint32_t table_factor = 0;  // entries of the hash table per reference
  uint32_t ids = 0;           // int32 [Q]: the id of an owner, -1, or -2 - owner for another column with its id
  uint32_t slot_of = 0;       // Index [Q]
  uint32_t order = 0;         // uint16 [H]
  uint32_t position_of = 0;   // uint16 [H]
  uint32_t hit_at = 0;        // uint8 [H]
  uint32_t valid = 0;         // uint32 [rows]
  uint32_t pages = 0;         // int32 [pages of H slots]
  uint32_t totals = 0;
  uint32_t keys = 0;     // int32 [table_factor * Q]
  uint32_t columns = 0;  // Index [table_factor * Q]
  // In the table's place, once nobody asks it any more:
  uint32_t new_order = 0;     // uint16 [H]
  uint32_t victims = 0;       // uint16 [min(Q, H)]
  uint32_t miss_columns = 0;  // Index [min(Q, H)]
  uint32_t bytes = 0;
};

/// `rows` and `top_k`: of the largest run; `wide`: 32-bit indices, for memory that is not shared memory.
inline ResolveLayout resolve_layout(
    uint32_t rows, uint32_t top_k, uint32_t slots, uint32_t pages, uint32_t table_factor, bool wide) {
  const uint32_t q = div_ceil(rows * top_k, 4u) * 4;
  const uint32_t h = div_ceil(slots, 8u) * 8;
  const uint32_t index = wide ? 4 : 2;
  const uint32_t loads = min_of(q, h);
  ResolveLayout l;
  l.table_factor = table_factor;
  const auto take = [](uint32_t& at, uint32_t bytes) {
    const uint32_t begin = at;
    at += div_ceil(bytes, 16u) * 16;
    return begin;
  };
  uint32_t at = 0;
  l.ids = take(at, 4 * q);
  l.slot_of = take(at, index * q);
  l.order = take(at, 2 * h);
  l.position_of = take(at, 2 * h);
  l.hit_at = take(at, h);
  l.valid = take(at, 4 * rows);
  l.pages = take(at, 4 * pages);
  l.totals = take(at, 2 * 32 * 8 + 16);
  uint32_t other = at;
  l.keys = take(at, 4 * table_factor * q);
  l.columns = take(at, index * table_factor * q);
  l.new_order = take(other, 2 * h);
  l.victims = take(other, 2 * loads);
  l.miss_columns = take(other, index * loads);
  l.bytes = max_of(at, other);
  return l;
}

}  // namespace hotplan::hisparse
