// The CPU backend with lengths that nobody checked, as a GPU kernel gets them: for tests of the rules on hostile
// values.
#include "../../csrc/compress/entry.cpp"

namespace hotplan::compress {

/// paged_prefill with an int in front: 0 paged, 1 legacy, 2 online (compress_ratio is then the state_slot_offset).
Results unchecked_prefill(Arguments& args) {
  Batch batch;
  PlanSet plans{.count = 1};
  const int64_t layout = args.integer("layout");
  batch.take_requests(args);
  batch.take_tables(args);
  batch.take_prefill_lengths(args);
  batch.lengths.on_host = false;
  const int64_t num_q_tokens = args.integer("num_q_tokens");
  if (layout == 0) plans.specs[0] = take_paged_spec(args, /*write_pad=*/true);
  if (layout == 1) plans.specs[0] = legacy_spec(args.integer("compress_ratio"));
  if (layout == 2) plans.specs[0] = online_spec(args.integer("state_slot_offset"));
  args.done();
  return prefill(batch, plans, num_q_tokens, true);
}

Results unchecked_decode(Arguments& args) {
  Batch batch;
  PlanSet plans{.count = 1};
  batch.take_requests(args);
  batch.take_tables(args);
  batch.take_decode_lengths(args);
  batch.lengths.on_host = false;
  plans.specs[0] = take_paged_spec(args, /*write_pad=*/false);
  args.done();
  return decode(batch, plans);
}

SGL_EXPORT(unchecked_prefill, unchecked_prefill)
SGL_EXPORT(unchecked_decode, unchecked_decode)

}  // namespace hotplan::compress
