/// \file rows.h
/// \brief One row of a plan from its token: the only place where rows are made.
#pragma once

#include <hotplan/compress/address.h>
#include <hotplan/compress/plan.h>
#include <hotplan/compress/rules.h>

namespace hotplan::compress {

/// The request that a row belongs to.
struct Request {
  Tokens tokens;
  int64_t rid;
  uint32_t index;         // in the batch
  uint32_t ragged_start;  // ragged id of its token j = 0
};

HOTPLAN_HD uint32_t ragged_of(const Request& r, int32_t position) {
  return r.ragged_start + static_cast<uint32_t>(position - r.tokens.prefix);
}

/// The row of a token that closes a window (paged, legacy) or ends a segment (online).
HOTPLAN_HD CompressRow compress_row(const PlanSpec& spec, const Tables& tables, const Request& r, int32_t position) {
  const auto seen = static_cast<uint32_t>(position - r.tokens.prefix) + 1;  // this request's inputs up to the token
  CompressRow row;
  row.seq_len = static_cast<uint32_t>(position) + 1;
  row.ragged_id = static_cast<uint16_t>(ragged_of(r, position));
  if (spec.layout == PlanLayout::kOnline) {
    const uint32_t in_segment = (static_cast<uint32_t>(position) & (spec.window - 1u)) + 1;
    row.buffer_len = static_cast<uint16_t>(min_of(seen, in_segment));
    row.read_page_0 = slot_field(spec, r.rid);
    row.read_page_1 = fit_int32(r.rid);
    return row;
  }
  row.buffer_len = static_cast<uint16_t>(spec.window - min_of<uint32_t>(seen, spec.window));
  if (row.buffer_len == 0 && spec.layout == PlanLayout::kPaged) {
    row.read_page_0 = -1;  // no consumer follows these; upstream's stage 1 leaves exactly this behind
    row.read_page_1 = static_cast<int32_t>(r.index);
    return row;
  }
  const int32_t positions[2] = {max_of(position - (1 << spec.ratio_log2), 0), position};
  Place places[2];
  locate(spec, tables, r.rid, positions, places);
  row.read_page_0 = places[0].page;
  row.read_page_1 = places[1].page;
  return row;
}

HOTPLAN_HD WriteRow write_row(const PlanSpec& spec, const Tables& tables, const Request& r, int32_t position) {
  const int32_t positions[1] = {position};
  Place places[1];
  locate(spec, tables, r.rid, positions, places);
  return {ragged_of(r, position), places[0].loc};
}

/// Decode: every request has exactly one row, for its newest token.
HOTPLAN_HD DecodeRow decode_row(const PlanSpec& spec, const Tables& tables, int64_t rid, int64_t seq) {
  DecodeRow row;
  row.seq_len = static_cast<uint32_t>(seq);
  if (spec.layout == PlanLayout::kOnline) {
    row.write_loc = row.read_page_0 = slot_field(spec, rid);
    row.read_page_1 = -1;
    return row;
  }
  const bool exists = seq >= 1 && seq <= kMaxInt32;
  const int32_t position = exists ? static_cast<int32_t>(seq - 1) : -1;
  const int32_t previous = exists ? max_of(position - (1 << spec.ratio_log2), 0) : -1;
  const int32_t positions[2] = {previous, position};
  Place places[2];
  locate(spec, tables, rid, positions, places);
  row.write_loc = places[1].loc;
  row.read_page_0 = places[0].page;
  row.read_page_1 = places[1].page;
  return row;
}

/// Online verify: one fixed row per request in each plan, whichever of the two it has; the other is invalid.
struct VerifyRows {
  CompressRow compress;
  CompressRow write;
};

HOTPLAN_HD VerifyRows
verify_rows(const PlanSpec& spec, int64_t rid, int64_t prefix, uint32_t num_draft_tokens, uint32_t index) {
  VerifyRows rows{CompressRow::invalid(), CompressRow::invalid()};
  const Tokens t = tokens_of(spec, RowKind::kWrite, prefix + num_draft_tokens, num_draft_tokens, num_draft_tokens);
  const Request r{t, rid, index, index * num_draft_tokens};
  const Tables none{};
  if (count_compress(spec, t) != 0) rows.compress = compress_row(spec, none, r, kth_compress(spec, t, 0));
  if (count_write(t) != 0) rows.write = compress_row(spec, none, r, kth_write(spec, t, 0));
  return rows;
}

}  // namespace hotplan::compress
