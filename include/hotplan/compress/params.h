/// \file params.h
/// \brief The contract between check and kernel: everything below was verified before it was filled in.
#pragma once

#include <hotplan/compress/rows.h>

namespace hotplan::compress {

/// Where the lengths of a batch lie. On the host they were checked; on the device they may hold anything.
struct Lengths {
  const int64_t* seq;     // [batch]; verify: nullptr
  const int64_t* extend;  // [batch]; decode: nullptr
  bool on_host;
};

/// One output array of a prefill call, with all that its rows need: a kernel block works on one of them.
struct alignas(64) PrefillOutput {
  PlanSpec spec;
  void* rows;         // CompressRow*, or WriteRow* for the write rows of paged and legacy plans
  uint32_t num_rows;  // rows past the plan's own become invalid rows
  RowKind kind;
  bool packed_write;  // rows are WriteRow
};

inline constexpr uint32_t kMaxPlans = 2;
inline constexpr uint32_t kMaxOutputs = 2 * kMaxPlans;

struct PrefillParams {
  Lengths lengths;
  const int64_t* rid;  // [batch]
  Tables tables;
  uint32_t batch;
  uint32_t num_q_tokens;
  uint32_t num_outputs;
  PrefillOutput outputs[kMaxOutputs];
};

struct alignas(64) DecodeOutput {
  PlanSpec spec;
  DecodeRow* rows;  // [batch]
};

struct DecodeParams {
  Lengths lengths;
  const int64_t* rid;  // [batch]
  Tables tables;
  uint32_t batch;
  uint32_t num_outputs;
  DecodeOutput outputs[kMaxPlans];
};

struct VerifyParams {
  const int32_t* prefix;  // [batch]
  const int64_t* rid;     // [batch]
  const void* active;     // one int32 or int64 beside the lengths, or nullptr: active_value counts
  bool active_is_int64;
  int64_t active_value;
  uint32_t batch;
  uint32_t num_draft_tokens;
  PlanSpec plan;
  CompressRow* compress;  // [batch]
  CompressRow* write;     // [batch]
};

/// The tokens of a request, as one output needs them, and how many of its rows they have.
HOTPLAN_HD Tokens tokens_for(const PrefillOutput& out, int64_t seq, int64_t extend, uint32_t num_q_tokens) {
  return tokens_of(out.spec, out.kind, seq, extend, num_q_tokens);
}

HOTPLAN_HD uint32_t count_rows(const PrefillOutput& out, const Tokens& t) {
  return count_rows(out.spec, out.kind, t);
}

HOTPLAN_HD void store_invalid(const PrefillOutput& out, uint32_t row) {
  if (out.packed_write) {
    static_cast<WriteRow*>(out.rows)[row] = WriteRow::invalid();
  } else {
    static_cast<CompressRow*>(out.rows)[row] = CompressRow::invalid();
  }
}

/// Stores the k-th row of a request to its place; a token past num_q_tokens (unchecked lengths only) has none.
HOTPLAN_HD void store_row(
    const PrefillOutput& out, const Tables& tables, uint32_t num_q_tokens, const Request& r, uint32_t k, uint32_t row) {
  const int32_t position = kth_row(out.spec, out.kind, r.tokens, k);
  if (ragged_of(r, position) >= num_q_tokens) {
    store_invalid(out, row);
  } else if (out.packed_write) {
    static_cast<WriteRow*>(out.rows)[row] = write_row(out.spec, tables, r, position);
  } else {
    static_cast<CompressRow*>(out.rows)[row] = compress_row(out.spec, tables, r, position);
  }
}

HOTPLAN_HD int64_t active_requests(const VerifyParams& p) {
  if (p.active == nullptr) return p.active_value;
  return p.active_is_int64 ? *static_cast<const int64_t*>(p.active) : *static_cast<const int32_t*>(p.active);
}

}  // namespace hotplan::compress
