/// \file items.cuh
/// \brief Copies of items between the pools, in the largest pieces that their size and addresses allow.
#pragma once

#include <hotplan/device_buffer/rules.h>
#include <hotplan/hisparse/copy.cuh>

namespace hotplan::device_buffer {

using hisparse::Piece;

struct ItemCopy {
  int64_t src;
  int32_t dst;
};

/// Where an item goes from and to. Its bytes count through the value and the scale, or through the keys' pool and the
/// values'.
struct ItemRow {
  const char* from;
  char* to;             // nullptr: nothing is written
  uint32_t page_slots;  // of a page: that of the source, and 256 times that of the target

  /// An item of DeepSeek-V4's pages.
  __device__ __forceinline__ static ItemRow paged(const char* host, int64_t src, char* device, int64_t dst) {
    const auto slots = static_cast<uint32_t>(src % kPageSlots + dst % kPageSlots * 256);
    return {host + paged_offset(src, 0), device + paged_offset(dst, 0), slots};
  }

  __device__ __forceinline__ Piece paged_piece(uint32_t byte) const {
    if (byte < kValueBytes) return {from + byte, to + byte};
    return {from + byte + scale_gap(page_slots % 256), to + byte + scale_gap(page_slots / 256), true};
  }
};

/// What that lane of the warp has.
__device__ __forceinline__ ItemRow of_lane(const ItemRow& row, uint32_t lane) {
  return {
      hisparse::shuffle(row.from, lane), hisparse::shuffle(row.to, lane), __shfl_sync(kFullMask, row.page_slots, lane)};
}

/// Items that a list names: list.at(n) is an ItemCopy.
template <typename List>
struct ItemRows {
  const Items& items;
  List list;

  __device__ __forceinline__ ItemRow row(uint32_t n) const {
    const ItemCopy copy = list.at(n);
    if (!is_copy(items, copy.src, copy.dst)) return {nullptr, nullptr, 0};
    if (items.paged) return ItemRow::paged(items.host[0], copy.src, items.device[0], copy.dst);
    return {items.host[0] + copy.src * items.item_bytes, items.device[0] + int64_t{copy.dst} * items.item_bytes, 0};
  }

  __device__ __forceinline__ Piece piece(const ItemRow& row, uint32_t byte) const {
    if (row.to == nullptr) return {nullptr, nullptr};
    if (items.paged) return row.paged_piece(byte);
    if (byte < items.item_bytes) return {row.from + byte, row.to + byte};
    return {second_pool(row.from, items.host) + byte, second_pool(row.to, items.device) + byte};
  }

 private:
  /// Where an item's byte 0 would be, counting back from its first byte in the second pool.
  template <typename Byte>
  __device__ __forceinline__ Byte* second_pool(Byte* in_first, Byte* const (&pools)[2]) const {
    const auto gap = reinterpret_cast<intptr_t>(pools[1]) - reinterpret_cast<intptr_t>(pools[0]);
    return in_first + (gap - static_cast<intptr_t>(items.item_bytes));
  }
};

/// Bytes of a piece: 16, 8, 4 or 1.
HOTPLAN_HD uint32_t piece_bytes(const Items& items) {
  uintptr_t bits = items.paged ? kPageBytes : items.item_bytes;  // a paged item's scale may be half a piece
  for (int pool = 0; pool < 2; ++pool) {
    bits |= reinterpret_cast<uintptr_t>(items.host[pool]) | reinterpret_cast<uintptr_t>(items.device[pool]);
  }
  return hisparse::piece_width(bits);
}

}  // namespace hotplan::device_buffer
