/// \file address.h
/// \brief Where a token's state lies in the ring: the location of (request, position), and its page.
#pragma once

#include <hotplan/compress/spec.h>

namespace hotplan::compress {

/// The server's page tables. Never read outside their shapes, whatever the indices are. Sizes are cut at 2^31: no index
/// that fits the tables' dtypes or an int32 position reaches further.
struct Tables {
  const int32_t* req_to_token;   // [num_reqs, width], rows req_stride apart
  const int64_t* full_to_state;  // [num_full_slots]
  int64_t req_stride;
  uint32_t num_reqs;
  uint32_t width;
  uint32_t num_full_slots;
};

/// A ring row and its page, as they stand in a plan; -1 for what no table holds or no int32 can say.
struct Place {
  int32_t loc;
  int32_t page;
};

/// 64-bit arithmetic until here: a page can fit where its row does not.
HOTPLAN_HD Place place_at(const PlanSpec& spec, int64_t loc) {
  return {fit_int32(loc), loc < 0 ? -1 : fit_int32(loc >> spec.ratio_log2)};
}

/// kPaged: each swa page has a ring of its own. The row is at most the slot, so for every real slot it fits.
HOTPLAN_HD Place place_of_near_swa(const PlanSpec& spec, uint32_t swa) {
  const uint32_t loc = spec.swa_page.div(swa) * spec.ring.divisor + spec.ring.mod(swa);
  return {static_cast<int32_t>(loc), static_cast<int32_t>(loc >> spec.ratio_log2)};
}

HOTPLAN_HD Place place_of_any_swa(const PlanSpec& spec, int64_t swa) {
  if (swa < 0) return {-1, -1};
  return place_at(spec, swa / spec.swa_page.divisor * spec.ring.divisor + swa % spec.ring.divisor);
}

/// kRequest: each request has a ring of its own. `first` is its first row.
HOTPLAN_HD Place place_in_ring(const PlanSpec& spec, uint64_t first, int32_t position) {
  const uint64_t loc = first + spec.ring.mod(static_cast<uint32_t>(position));
  const uint64_t page = loc >> spec.ratio_log2;
  return {(loc >> 31) == 0 ? static_cast<int32_t>(loc) : -1, (page >> 31) == 0 ? static_cast<int32_t>(page) : -1};
}

/// Places of N positions of one request. All look-ups of a step are issued before the first is used: a compress row
/// waits for two dependent loads then, not for four.
template <int N>
HOTPLAN_HD void locate(
    const PlanSpec& spec, const Tables& tables, int64_t rid, const int32_t (&position)[N], Place (&place)[N]) {
  if (spec.address == AddressKind::kRequest) {
    // A rid past int32 fits no field: its page is at least rid.
    const bool exists = (static_cast<uint64_t>(rid) >> 31) == 0;
    const uint64_t first = static_cast<uint64_t>(static_cast<uint32_t>(rid)) * spec.ring.divisor;
    for (int k = 0; k < N; ++k) {
      const Place p = place_in_ring(spec, first, position[k]);
      const bool valid = exists && position[k] >= 0;
      place[k] = {valid ? p.loc : -1, valid ? p.page : -1};
    }
    return;
  }
  const bool exists = static_cast<uint64_t>(rid) < tables.num_reqs;
  const int64_t row = exists ? rid * tables.req_stride : 0;
  int32_t full[N];
  int64_t swa[N];
  for (int k = 0; k < N; ++k) {
    const bool valid = exists && static_cast<uint32_t>(position[k]) < tables.width;
    full[k] = valid ? tables.req_to_token[row + position[k]] : -1;
  }
  for (int k = 0; k < N; ++k) {
    const bool valid = static_cast<uint32_t>(full[k]) < tables.num_full_slots;
    swa[k] = valid ? tables.full_to_state[full[k]] : -1;
  }
  uint64_t bits = 0;
  for (int k = 0; k < N; ++k) bits |= static_cast<uint64_t>(swa[k]);
  if ((bits >> 31) == 0) {
    for (int k = 0; k < N; ++k) place[k] = place_of_near_swa(spec, static_cast<uint32_t>(swa[k]));
  } else {
    for (int k = 0; k < N; ++k) place[k] = place_of_any_swa(spec, swa[k]);
  }
}

/// kSlot: the committed state row of a request.
HOTPLAN_HD int32_t slot_field(const PlanSpec& spec, int64_t rid) {
  return rid < 0 || rid > kMaxInt32 ? -1 : fit_int32(rid + spec.slot_offset);
}

}  // namespace hotplan::compress
