/// \file rules.h
/// \brief Which rows and tokens are valid, and where the bytes of an item lie. Shared by the CPU backend and the
/// kernels.
#pragma once

#include <hotplan/device_buffer/params.h>

namespace hotplan::device_buffer {

// ---------------------------------------------------------------------------------------------------------------------
// Rows
// ---------------------------------------------------------------------------------------------------------------------

/// Rows from num_real on pad the batch of a captured graph.
HOTPLAN_HD bool is_padding(const int32_t* num_real, uint32_t row) {
  return num_real != nullptr && static_cast<int64_t>(row) >= *num_real;
}

/// The state row of a request, or -1 where there is none.
HOTPLAN_HD int32_t state_of(const SwapInParams& p, uint32_t row) {
  const int64_t request = p.requests.at(row);
  return request >= 0 && request < p.states ? static_cast<int32_t>(request) : -1;
}

/// A request that fits its slots: slot t holds token t. Several steps have no such rule.
HOTPLAN_HD bool is_short(const SwapInParams& p, int64_t length) {
  return p.steps == 1 && length <= p.slots;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tokens
// ---------------------------------------------------------------------------------------------------------------------

/// The token that a column asks for, any int32; -1 for a block that is none.
HOTPLAN_HD int32_t token_at(const SwapInParams& p, const int32_t* entries, uint32_t column) {
  if (!p.blocks) return entries[column];
  const uint32_t entry = p.block_tokens.div(column);
  const int32_t block = entries[entry];
  if (block < 0) return -1;
  return fit_int32(static_cast<int64_t>(block) * p.block_tokens.divisor + (column - entry * p.block_tokens.divisor));
}

/// A short request: the slot of a column's token, or -1. Where entries are tokens, only the first `length` of them
/// count.
HOTPLAN_HD int32_t short_slot(const SwapInParams& p, int64_t length, uint32_t column, int32_t token) {
  if (token < 0 || token >= length) return -1;
  return p.blocks || column < length ? token : -1;
}

/// What `loc` is worth as a device row: itself, or -1 where it is none.
HOTPLAN_HD int32_t device_row(const Items& items, int32_t loc) {
  return loc >= 0 && loc < items.device_rows ? loc : -1;
}

/// Whether a token can be in the pools at all.
HOTPLAN_HD bool exists(const SwapInParams& p, int64_t length, int32_t token) {
  return token >= 0 && token < length && static_cast<uint32_t>(token) < p.max_tokens;
}

/// Whether the slots behind the LRU are asked for a token. One step: the newest token is in the first of them, whatever
/// `tokens` says. Several steps: the last `extra` tokens may be in any of them, as `tokens` says.
HOTPLAN_HD bool may_be_extra(const SwapInParams& p, int64_t length, int32_t token) {
  return p.steps == 1 ? int64_t{token} + 1 == length : token >= 0 && token < length && token >= length - p.extra;
}

/// The row that an extra slot has for such a token, or -1. `tokens` and `locs` are those of the request's extra slots.
HOTPLAN_HD int32_t extra_row(const SwapInParams& p, const int32_t* tokens, const int32_t* locs, int32_t token) {
  if (p.steps == 1) return device_row(p.items, locs[0]);
  for (uint32_t i = 0; i < p.extra; ++i) {
    if (tokens[i] == token) return device_row(p.items, locs[i]);
  }
  return -1;
}

/// The host row of a token that exists, or -1: a token without one gives -1 and touches nothing.
HOTPLAN_HD int64_t host_row(const SwapInParams& p, int32_t state, int32_t token) {
  const int64_t loc = p.host_locs[static_cast<int64_t>(state) * p.max_tokens + token];
  return loc >= 0 && loc < p.items.host_rows ? loc : -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Bytes
// ---------------------------------------------------------------------------------------------------------------------

/// DeepSeek-V4's pages: 64 values, then their scales, then 64 unused bytes.
inline constexpr uint32_t kPageSlots = 64;
inline constexpr uint32_t kPageBytes = 37440;
inline constexpr uint32_t kValueBytes = 576;
inline constexpr uint32_t kScaleBytes = 8;
inline constexpr uint32_t kScalesAt = kPageSlots * kValueBytes;
inline constexpr uint32_t kPagedItemBytes = kValueBytes + kScaleBytes;

/// What lies between the value and the scale of a slot.
HOTPLAN_HD uint32_t scale_gap(uint32_t slot) {
  return kScalesAt + slot * kScaleBytes - (slot + 1) * kValueBytes;
}

/// Offset in a paged pool of byte `byte` of item `row`; pieces that begin there must not cross kValueBytes.
HOTPLAN_HD int64_t paged_offset(int64_t row, uint32_t byte) {
  const int64_t page = row / kPageSlots * kPageBytes;
  const auto slot = static_cast<uint32_t>(row % kPageSlots);
  return page +
         (byte < kValueBytes ? slot * kValueBytes + byte : kScalesAt + slot * kScaleBytes + (byte - kValueBytes));
}

/// Bytes of an item in all its pools: in a copy they count through the first pool, then the second.
HOTPLAN_HD uint32_t copied_bytes(const Items& items) {
  return items.item_bytes * (items.host[1] != nullptr ? 2 : 1);
}

/// Whether a copy of a plan is one, whatever the plan says.
HOTPLAN_HD bool is_copy(const Items& items, int64_t src, int64_t dst) {
  return src >= 0 && src < items.host_rows && dst >= 0 && dst < items.device_rows;
}

/// A plan's copies in row `row`, whatever its count says.
HOTPLAN_HD uint32_t listed(const PlannedCopyParams& p, uint32_t row) {
  if (is_padding(p.num_real, row)) return 0;
  return static_cast<uint32_t>(clamp_to<int64_t>(p.miss_count[row], 0, p.capacity));
}

// ---------------------------------------------------------------------------------------------------------------------
// Translation
// ---------------------------------------------------------------------------------------------------------------------

/// A location behind the mapping has no row: -1.
HOTPLAN_HD int64_t translated(const TranslateParams& p, int64_t i) {
  const int64_t loc = p.locations.at(i * p.stride);
  if (loc < 0) return loc;
  return loc < p.mapping_size ? p.mapping.at(loc) : -1;
}

}  // namespace hotplan::device_buffer
