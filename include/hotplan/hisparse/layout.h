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

inline bool fits_tile(const SetShape& shape) {
  return shape.columns <= kTileColumns && shape.slots <= kTileSlots;
}

/// Byte offsets. What the addressing keeps comes first.
struct SetLayout {
  uint32_t table_size = 0;  // entries of the hash table
  uint32_t ids = 0;         // int32 [Q]: the id of an owner, -1, or -2 - owner for another column with its id
  uint32_t slot_of = 0;     // Index [Q]; at last the block's copies, sorted
  uint32_t order = 0;       // uint16 [H]
  uint32_t new_order = 0;   // uint16 [H]; in a repair the inverse of the order
  uint32_t flags = 0;       // uint8 [H], by slot
  uint32_t totals = 0;      // WarpTotals, then the flag has_duplicates; at last what sort_copies counts
  uint32_t keys = 0;        // int32 [table_size]
  uint32_t columns = 0;     // Index [table_size]
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
  take(at, shape.own_bytes);
  l.ids = take(at, 4 * q);
  l.slot_of = take(at, index * q);
  l.order = take(at, 2 * h);
  l.new_order = take(at, 2 * h);
  l.flags = take(at, h);
  l.totals = take(at, 2 * 32 * 8 + 16);
  uint32_t other = at;
  l.keys = take(at, 4 * table_size);
  l.columns = take(at, index * table_size);
  l.victims = take(other, 2 * min_of(q, h));
  l.sources = take(other, shape.source_bytes * min_of(q, h + shape.spare));
  l.bytes = max_of(at, other);
  return l;
}

/// A set that the blocks of a cluster divide (divided.cuh): what each block has, as powers of two, and byte offsets in
/// its memory. What the addressing keeps comes first.
struct DividedLayout {
  uint32_t columns_log2 = 0;
  uint32_t slots_log2 = 0;
  uint32_t entries_log2 = 0;
  uint32_t entries = 0;  // Entry [entries]; at last the order of the copies
  uint32_t slot_of = 0;  // int32 [columns]
  uint32_t named = 0;    // uint32 [slots of all blocks / 32]: slots that this block's positions name
  uint32_t inbox = 0;    // the same words of every block, for the slots of this one
  uint32_t hits = 0;     // uint32 [slots of all blocks / 32]
  uint32_t sources = 0;  // of this block's copies
  uint32_t victims = 0;  // uint16, of this block's copies
  uint32_t totals = 0;   // WarpTotals, then the flag `corrupt`; at last what sort_copies counts
  uint32_t shares = 0;   // Share [blocks]
  uint32_t bytes = 0;
};

/// What a thread has of a divided set.
inline constexpr uint32_t kDividedColumns = 1;
inline constexpr uint32_t kDividedSlots = 2;

/// Whether 2^blocks_log2 blocks can divide a set, and how.
inline bool divide_set(const SetShape& shape, uint32_t blocks_log2, uint32_t shared_bytes, DividedLayout& l) {
  const auto log2_for = [](uint32_t count, uint32_t least) {
    uint32_t log2 = least;
    while (log2 < 31 && (1u << log2) < count) ++log2;
    return log2;
  };
  const uint32_t blocks = 1u << blocks_log2;
  l.columns_log2 = log2_for(div_ceil(shape.columns, blocks), 5);  // whole warps
  l.slots_log2 = log2_for(div_ceil(shape.slots, blocks), 6);
  if (1u << l.columns_log2 > kDividedColumns * kResolveThreads) return false;
  if (1u << l.slots_log2 > kDividedSlots * kResolveThreads) return false;
  l.entries_log2 = l.columns_log2 + 3;  // eight per id
  const uint32_t copies = div_ceil(min_of(shape.columns, shape.slots + shape.spare), blocks);
  const uint32_t all_slots = blocks << l.slots_log2;
  uint32_t at = 0;
  const auto take = [&](uint32_t bytes) {
    const uint32_t begin = at;
    at += div_ceil(bytes, 16u) * 16;
    return begin;
  };
  take(shape.own_bytes);
  l.entries = take(8 << l.entries_log2);
  l.slot_of = take(4 << l.columns_log2);
  l.named = take(all_slots / 8);
  l.inbox = take(all_slots / 8);
  l.hits = take(all_slots / 8);
  l.sources = take(shape.source_bytes * copies);
  l.victims = take(2 * copies);
  l.totals = take(2 * 32 * 8 + 16);
  l.shares = take(8 * blocks);
  l.bytes = at;
  return at <= shared_bytes;
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
    const bool tile = fits_tile(shape);
    for (const uint32_t roomier : {4u, 2u, 1u}) {
      const SetLayout l = set_layout(shape, size * roomier, false);
      if (l.bytes <= shared_bytes) return {tile ? Span::kTile : Span::kLoop, l};
    }
  }
  return {Span::kWide, set_layout(shape, size, true)};
}

/// What a launch says about a resolution, beside the family's params.
struct SetLaunch {
  uint32_t cluster_log2;  // blocks per set
  bool vector_columns;    // rows of columns, of the LRU and of held ids can be read a pack at a time
  bool vector_lru;
  bool vector_held;
  bool vector_out;  // and rows of outputs be written
  bool copy;
  bool divided;     // among the blocks of a cluster, as `division` says
  char* workspace;  // wide: layout.bytes for every block
  SetLayout layout;
  DividedLayout division;
};

}  // namespace hotplan::hisparse
