/// \file spec.h
/// \brief All that makes one ratio's plan: membership, addresses, layout. Plain data, the same on host and device.
#pragma once

#include <hotplan/platform.h>

namespace hotplan::compress {

enum class WriteRule : uint8_t {
  kTail,    // everything from first_w on (all paged and legacy plans)
  kSegment  // online c128: one row for a trailing segment that does not end on a multiple of the ratio
};

enum class AddressKind : uint8_t {
  kPaged,    // c4: through req_to_token and full_to_state, one ring of rows per swa page
  kRequest,  // c128, c4 with use_req_ring, legacy: one ring of rows per request
  kSlot      // online c128: one row per request, no ring
};

enum class PlanLayout : uint8_t {
  kPaged,   // pages only where the ring is read
  kLegacy,  // pages always
  kOnline   // segments: state slots instead of pages, buffer_len is the segment's length
};

/// 40 bytes: with an output's pointer and size it fills one line of the constant cache, where a kernel's parameters
/// arrive cold at every launch.
struct PlanSpec {
  FastDiv swa_page;     // paged: tokens of an swa page
  FastDiv ring;         // kPaged, kRequest: rows of a ring
  int32_t write_pad;    // kTail: trailing tokens kept for a verify batch of any accept length
  int32_t slot_offset;  // kSlot: where the committed bank begins
  uint16_t window;      // 8 for c4 (overlapping windows), 128 for c128
  uint8_t ratio_log2;
  uint8_t keep;    // kTail: rows before the last closed window that the ring must keep: 4 for c4, 0 for c128
  bool page_tail;  // kTail: the last 4 tokens of every swa page are written too (paged c4)
  WriteRule write_rule;
  AddressKind address;
  PlanLayout layout;
};

static_assert(sizeof(PlanSpec) == 40);

}  // namespace hotplan::compress
