/// \file rules.h
/// \brief Which tokens a plan holds: how many of a request, and the k-th of them, in closed form.
///
/// Everything that walks a plan uses these functions: the kernels (one thread, one row: "the k-th of request i"), the
/// CPU backend (all k of all i) and the host that sizes the outputs (only "how many"). Nothing loops over tokens.
#pragma once

#include <hotplan/compress/plan.h>
#include <hotplan/compress/spec.h>

namespace hotplan::compress {

enum class RowKind : uint8_t { kCompress, kWrite };

/// The new tokens of one request, as positions. `prefix` is the position of its token j = 0.
struct Tokens {
  int32_t prefix;
  int32_t begin;        // first position that exists: prefix, or 0 where a hostile extend exceeds seq
  int32_t end;          // one past the last position
  int32_t write_begin;  // first position of the write rule's tail, inside [begin, end]
  uint32_t page_tails;  // written positions before write_begin: the last 4 of each swa page
};

/// How many ragged ids a request takes. Lengths that came from the GPU are unchecked, hence the clamp.
HOTPLAN_HD uint32_t ragged_ids(int64_t extend, uint32_t num_q_tokens) {
  return static_cast<uint32_t>(clamp_to<int64_t>(extend, 0, num_q_tokens));
}

/// Positions of [0, p) that are among the last 4 of their swa page.
HOTPLAN_HD uint32_t page_tail_before(const PlanSpec& spec, int32_t p) {
  const uint32_t page = spec.swa_page.div(static_cast<uint32_t>(p));
  const int32_t offset = p - static_cast<int32_t>(page * spec.swa_page.divisor);
  const int32_t tail_begin = static_cast<int32_t>(spec.swa_page.divisor) - 4;
  return page * 4 + static_cast<uint32_t>(max_of(offset - tail_begin, 0));
}

/// Positions of a request's new tokens. Correct for every int64 input: tokens at negative positions or at 2^31 - 1 and
/// beyond do not exist, and tokens past num_q_tokens cannot have a row. For kCompress the last two fields say nothing.
///
/// A kernel does this for every request in every block, hence 32 bits wherever they are enough, and selects.
HOTPLAN_HD Tokens tokens_of(const PlanSpec& spec, RowKind rows, int64_t seq, int64_t extend, uint32_t num_q_tokens) {
  const auto first = static_cast<int64_t>(static_cast<uint64_t>(seq) - static_cast<uint64_t>(extend));
  if (seq <= 0 || extend <= 0 || first <= -static_cast<int64_t>(kMaxTokens) || first >= kMaxInt32) return {};
  const auto prefix = static_cast<int32_t>(first);
  const uint32_t count = min_of(ragged_ids(extend, num_q_tokens), static_cast<uint32_t>(kMaxInt32 - first));
  const int32_t begin = max_of(prefix, 0);
  const int32_t end = max_of(prefix + static_cast<int32_t>(count), begin);
  Tokens t{prefix, begin, end, end, 0};
  if (rows == RowKind::kCompress) return t;
  if (spec.write_rule == WriteRule::kTail) {
    // first_w = min(last_closed - keep, seq - write_pad), and last_closed = seq - seq % ratio.
    const auto open = static_cast<int32_t>(seq) & ((1 << spec.ratio_log2) - 1);
    const int64_t first_write = seq - max_of(open + spec.keep, spec.write_pad);
    t.write_begin = static_cast<int32_t>(clamp_to<int64_t>(first_write, begin, end));
  } else {
    // Only the request's true last token can be a trailing segment's row, and only off a multiple of the ratio.
    const bool open = end == seq && (end & ((1 << spec.ratio_log2) - 1)) != 0;
    t.write_begin = open && end > begin ? end - 1 : end;
  }
  if (spec.page_tail) t.page_tails = page_tail_before(spec, t.write_begin) - page_tail_before(spec, begin);
  return t;
}

/// Compress rows: positions p of [begin, end) with (p + 1) % ratio == 0.
HOTPLAN_HD uint32_t count_compress(const PlanSpec& spec, const Tokens& t) {
  return (static_cast<uint32_t>(t.end) >> spec.ratio_log2) - (static_cast<uint32_t>(t.begin) >> spec.ratio_log2);
}

HOTPLAN_HD int32_t kth_compress(const PlanSpec& spec, const Tokens& t, uint32_t k) {
  const uint32_t block = (static_cast<uint32_t>(t.begin) >> spec.ratio_log2) + k;
  return static_cast<int32_t>(((block + 1) << spec.ratio_log2) - 1);
}

/// Write rows: the page tails of [begin, write_begin), then all of [write_begin, end).
HOTPLAN_HD uint32_t count_write(const Tokens& t) {
  return t.page_tails + static_cast<uint32_t>(t.end - t.write_begin);
}

HOTPLAN_HD int32_t kth_write(const PlanSpec& spec, const Tokens& t, uint32_t k) {
  if (k >= t.page_tails) return t.write_begin + static_cast<int32_t>(k - t.page_tails);
  const uint32_t nth = page_tail_before(spec, t.begin) + k;
  return static_cast<int32_t>((nth >> 2) * spec.swa_page.divisor + spec.swa_page.divisor - 4 + (nth & 3));
}

HOTPLAN_HD uint32_t count_rows(const PlanSpec& spec, RowKind rows, const Tokens& t) {
  return rows == RowKind::kWrite ? count_write(t) : count_compress(spec, t);
}

HOTPLAN_HD int32_t kth_row(const PlanSpec& spec, RowKind rows, const Tokens& t, uint32_t k) {
  return rows == RowKind::kWrite ? kth_write(spec, t, k) : kth_compress(spec, t, k);
}

/// The default write pad: enough trailing tokens in a speculative ring for a verify batch of any accept length. A write
/// at w lands on w - ring, and the oldest position that a later window still needs is prefix - window + 2.
inline int64_t default_write_pad(int64_t ring_size, int64_t window) {
  return ring_size > window ? ring_size - window + 2 : 0;
}

}  // namespace hotplan::compress
