/// \file layout.h
/// \brief A block's memory in the resolution of a set: which arrays, how large, and whether they fit shared memory.
#pragma once

#include <hotplan/platform.h>

namespace hotplan::hisparse {

/// Columns of a set that 16-bit indices can count, with room for "none", "nowhere" and a mark.
inline constexpr uint32_t kMaxNarrowColumns = 32766;

/// Where a set's arrays are.
enum class Span : uint32_t {
  kTile,  // a pack of each per thread, in its registers; what others ask for in shared memory
  kLoop,  // shared memory
  kWide,  // global memory, with 32-bit indices
};

/// A resolution is bound by fetching its instructions, each of which runs once: many threads with few elements each
/// have the shortest code. 512 threads with twice the elements run a quarter fewer instructions in all, and take
/// longer.
inline constexpr uint32_t kResolveThreads = 1024;

/// What a thread takes at a time: columns, and slots of the LRU.
inline constexpr uint32_t kColumnPack = 2;
inline constexpr uint32_t kSlotPack = 4;
inline constexpr uint32_t kTileColumns = kColumnPack * kResolveThreads;
inline constexpr uint32_t kTileSlots = kSlotPack * kResolveThreads;

/// The largest set that a launch can have.
struct SetShape {
  uint32_t columns;
  uint32_t slots;
  uint32_t spare;         // copies that can be made into no slot
  uint32_t source_bytes;  // of a copy's source
  uint32_t own_bytes;     // what the addressing keeps for itself
};

/// Byte offsets.
struct SetLayout {
  uint32_t table_size = 0;  // entries of the hash table
  uint32_t ids = 0;         // int32 [Q]: the id of an owner, -1, or -2 - owner for another column with its id
  uint32_t slot_of = 0;     // Index [Q]; at last the block's copies, sorted
  uint32_t order = 0;       // uint16 [H]
  uint32_t new_order = 0;   // uint16 [H]; in a repair the inverse of the order
  uint32_t flags = 0;       // uint8 [H], by slot
  uint32_t totals = 0;      // WarpTotals, then the flag has_duplicates; at last what sort_copies counts
  uint32_t own = 0;
  uint32_t keys = 0;     // int32 [table_size]
  uint32_t columns = 0;  // Index [table_size]
  // In the table's place, once nobody asks it any more:
  uint32_t victims = 0;  // uint16 [min(Q, H)]
  uint32_t sources = 0;  // [min(Q, H + spare)]
  uint32_t bytes = 0;
};

inline SetLayout set_layout(const SetShape& shape, uint32_t table_size, bool wide) {
  const uint32_t q = div_ceil(shape.columns, kColumnPack) * kColumnPack;
  const uint32_t h = div_ceil(shape.slots, kSlotPack) * kSlotPack;
  const uint32_t index = wide ? 4 : 2;
  SetLayout l;
  l.table_size = table_size;
  const auto take = [](uint32_t& at, uint32_t bytes) {
    const uint32_t begin = at;
    at += div_ceil(bytes, 16u) * 16;
    return begin;
  };
  uint32_t at = 0;
  l.ids = take(at, 4 * q);
  l.slot_of = take(at, index * q);
  l.order = take(at, 2 * h);
  l.new_order = take(at, 2 * h);
  l.flags = take(at, h);
  l.totals = take(at, 2 * 32 * 8 + 16);
  l.own = take(at, shape.own_bytes);
  uint32_t other = at;
  l.keys = take(at, 4 * table_size);
  l.columns = take(at, index * table_size);
  l.victims = take(other, 2 * min_of(q, h));
  l.sources = take(other, shape.source_bytes * min_of(q, h + shape.spare));
  l.bytes = max_of(at, other);
  return l;
}

struct SetPlan {
  Span span;
  SetLayout layout;
};

/// The roomiest table that fits: eight entries per id or down to two.
inline SetPlan plan_set(const SetShape& shape, uint32_t shared_bytes) {
  uint32_t size = 4;
  while (size < 2 * shape.columns) size *= 2;
  if (shape.columns <= kMaxNarrowColumns) {
    const bool tile = shape.columns <= kTileColumns && shape.slots <= kTileSlots;
    for (const uint32_t roomier : {4u, 2u, 1u}) {
      const SetLayout l = set_layout(shape, size * roomier, false);
      if (l.bytes <= shared_bytes) return {tile ? Span::kTile : Span::kLoop, l};
    }
  }
  return {Span::kWide, set_layout(shape, size, true)};
}

}  // namespace hotplan::hisparse
