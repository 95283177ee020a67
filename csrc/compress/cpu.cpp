/// \file cpu.cpp
/// \brief The CPU backend: the same rows from the same functions, one request after the other.
#include "launch.h"

namespace hotplan::compress {

namespace {

void fill_output(const PrefillParams& p, const PrefillOutput& out) {
  uint32_t row = 0;
  uint32_t ragged = 0;
  for (uint32_t i = 0; i < p.batch; ++i) {
    const int64_t extend = p.lengths.extend[i];
    const Tokens tokens = tokens_for(out, p.lengths.seq[i], extend, p.num_q_tokens);
    const Request request{tokens, p.rid[i], i, ragged};
    const uint32_t count = count_rows(out, tokens);
    for (uint32_t k = 0; k < count && row < out.num_rows; ++k) {
      store_row(out, p.tables, p.num_q_tokens, request, k, row++);
    }
    ragged += ragged_ids(extend, p.num_q_tokens);
  }
  for (; row < out.num_rows; ++row) store_invalid(out, row);
}

}  // namespace

Status run_prefill(const PrefillParams& p, Queue) {
  for (uint32_t i = 0; i < p.num_outputs; ++i) fill_output(p, p.outputs[i]);
  return 0;
}

Status run_decode(const DecodeParams& p, Queue) {
  for (uint32_t o = 0; o < p.num_outputs; ++o) {
    const DecodeOutput& out = p.outputs[o];
    for (uint32_t i = 0; i < p.batch; ++i) out.rows[i] = decode_row(out.spec, p.tables, p.rid[i], p.lengths.seq[i]);
  }
  return 0;
}

Status run_verify(const VerifyParams& p, Queue) {
  const int64_t active = active_requests(p);
  for (uint32_t i = 0; i < p.batch; ++i) {
    const VerifyRows rows = i < active ? verify_rows(p.plan, p.rid[i], p.prefix[i], p.num_draft_tokens, i)
                                       : VerifyRows{CompressRow::invalid(), CompressRow::invalid()};
    p.compress[i] = rows.compress;
    p.write[i] = rows.write;
  }
  return 0;
}

const char* status_text(Status) {
  return "ok";
}

}  // namespace hotplan::compress
