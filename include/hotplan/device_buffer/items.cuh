/// \file items.cuh
/// \brief Copies of items between the pools, in the largest pieces that their size and addresses allow.
#pragma once

#include <hotplan/device_buffer/rules.h>
#include <hotplan/hisparse/copy.cuh>

namespace hotplan::device_buffer {

using hisparse::kWarp;
using hisparse::Piece;

struct ItemCopy {
  int64_t src;
  int32_t dst;
};

/// Items that a list names: list.at(n) is an ItemCopy.
template <typename List>
struct ItemRows {
  const Items& items;
  List list;

  __device__ __forceinline__ Piece piece(uint32_t n, uint32_t byte) const {
    const ItemCopy copy = list.at(n);
    if (!is_copy(items, copy.src, copy.dst)) return {nullptr, nullptr};
    const uint32_t pool = byte >= items.item_bytes ? 1 : 0;
    const uint32_t in_item = byte - pool * items.item_bytes;
    return {
        items.host[pool] + item_offset(items, copy.src, in_item),
        items.device[pool] + item_offset(items, copy.dst, in_item), items.paged && byte >= kValueBytes};
  }
};

/// Bytes of a piece: 16, 8, 4 or 1.
HOTPLAN_HD uint32_t piece_bytes(const Items& items) {
  uintptr_t bits = items.paged ? kPageBytes : items.item_bytes;  // a paged item's scale is half a piece
  for (int pool = 0; pool < 2; ++pool) {
    bits |= reinterpret_cast<uintptr_t>(items.host[pool]) | reinterpret_cast<uintptr_t>(items.device[pool]);
  }
  return bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : 1;
}

/// Copies list.at(0), ..., list.at(count - 1). This warp is one of `workers`.
template <int kBatch, typename List>
__device__ __forceinline__ void copy_items(
    const Items& items, const List& list, uint32_t count, uint32_t piece_bytes, uint32_t worker, uint32_t workers) {
  hisparse::copy_rows<kBatch>(ItemRows<List>{items, list}, count, copied_bytes(items), piece_bytes, worker, workers);
}

}  // namespace hotplan::device_buffer
