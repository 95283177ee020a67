/// \file entry.cpp
/// \brief The operators of the compress family: check everything, allocate, run. The only file that knows tvm-ffi.
///
/// The same file serves both backends: linked with cpu.cpp it takes CPU tensors, linked with launch.cu CUDA tensors.
/// Argument names in messages are those of the Python functions in `hotplan/compress.py`.
#include <sgl_kernel/checks.h>

#include "launch.h"

namespace hotplan::compress {

using host::kAnySize;
using host::kBackend;
using host::kUInt8;
using host::OptionalTensor;
using host::panic;
using host::RuntimeCheck;
using host::SymbolicDevice;
using host::SymbolicDType;
using host::SymbolicSize;
using host::TensorMatcher;
using host::ffi::Arguments;
using host::ffi::Results;
using host::ffi::Tensor;
using host::ffi::TensorView;

namespace {

constexpr int64_t kMaxRing = int64_t{1} << 30;

// ---------------------------------------------------------------------------------------------------------------------
// Scalars -> PlanSpec
// ---------------------------------------------------------------------------------------------------------------------

uint8_t ratio_log2(int64_t ratio, const char* name) {
  RuntimeCheck(ratio == 4 || ratio == 128, name, ": expected 4 or 128, got ", ratio);
  return ratio == 4 ? 2 : 7;
}

int32_t checked_offset(int64_t state_slot_offset) {
  RuntimeCheck(
      state_slot_offset >= 0 && state_slot_offset <= kMaxInt32,
      "state_slot_offset: expected a number in [0, 2147483647], got ", state_slot_offset);
  return static_cast<int32_t>(state_slot_offset);
}

/// The rule and the addresses that all plans of a ratio start from: legacy, that is, with one ring per request.
PlanSpec legacy_spec(int64_t ratio, const char* name = "compress_ratio") {
  const uint8_t log2 = ratio_log2(ratio, name);
  const bool overlap = ratio == 4;
  PlanSpec spec{};
  spec.ratio_log2 = log2;
  spec.window = overlap ? 8 : 128;
  spec.keep = overlap ? 4 : 0;
  spec.address = AddressKind::kRequest;
  // Two pages of 4 rows per request (c4), page rid * 2 + (p / 4) % 2, are a ring of 8; one page of 128 (c128) is a
  // ring.
  spec.ring = FastDiv(spec.window);
  spec.layout = PlanLayout::kLegacy;
  return spec;
}

/// A paged plan from its scalars. No write_pad means the one that the ring's size asks for.
PlanSpec paged_spec(
    int64_t ratio, int64_t swa_page_size, int64_t ring, std::optional<int64_t> write_pad, bool use_req_ring) {
  PlanSpec spec = legacy_spec(ratio);
  RuntimeCheck(
      ring > 0 && ring <= kMaxRing && ring % ratio == 0,
      "ring_size: expected a positive multiple of compress_ratio=", ratio, ", got ", ring);
  RuntimeCheck(
      swa_page_size > 0 && swa_page_size <= kMaxRing && swa_page_size % ring == 0,
      "swa_page_size: expected a positive multiple of ring_size=", ring, ", got ", swa_page_size);
  const int64_t pad = write_pad.value_or(default_write_pad(ring, spec.window));
  RuntimeCheck(pad >= 0 && pad <= kMaxInt32, "write_pad: expected None or a number in [0, 2147483647], got ", pad);
  const bool paged = ratio == 4 && !use_req_ring;
  spec.write_pad = static_cast<int32_t>(pad);
  spec.page_tail = paged;
  spec.swa_page = FastDiv(static_cast<uint32_t>(swa_page_size));
  spec.address = paged ? AddressKind::kPaged : AddressKind::kRequest;
  spec.ring = FastDiv(static_cast<uint32_t>(ring));
  spec.layout = PlanLayout::kPaged;
  return spec;
}

PlanSpec online_spec(int64_t state_slot_offset) {
  PlanSpec spec = legacy_spec(128);
  spec.write_rule = WriteRule::kSegment;
  spec.address = AddressKind::kSlot;
  spec.slot_offset = checked_offset(state_slot_offset);
  spec.layout = PlanLayout::kOnline;
  return spec;
}

uint32_t checked_tokens(int64_t num_q_tokens) {
  RuntimeCheck(
      num_q_tokens >= 0 && num_q_tokens <= kMaxTokens, "num_q_tokens: expected a number in [0, ", kMaxTokens, "], got ",
      num_q_tokens);
  return static_cast<uint32_t>(num_q_tokens);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensors
// ---------------------------------------------------------------------------------------------------------------------

/// The tensors of one batch, checked against each other.
struct Batch {
  SymbolicSize size{"batch"};
  SymbolicDevice device{kBackend};
  SymbolicDevice lengths_device{kDLCPU, kBackend};
  const int64_t* rid = nullptr;
  Tables tables{};
  Lengths lengths{};

  void take_requests(Arguments& args) {
    rid = static_cast<const int64_t*>(TensorMatcher({size}).with_dtype<int64_t>().with_device(device).verify(
        args.tensor("req_pool_indices"), "req_pool_indices"));
    RuntimeCheck(
        size.unwrap() <= kMaxInt32, "req_pool_indices: expected fewer than 2^31 requests, got ", size.unwrap());
  }

  void take_tables(Arguments& args) {
    SymbolicSize row_stride("row stride");
    const TensorView req_to_token = args.tensor("req_to_token");
    const TensorView full_to_state = args.tensor("full_to_state");
    tables.req_to_token = static_cast<const int32_t*>(TensorMatcher({kAnySize, kAnySize})
                                                          .with_strides({row_stride, 1})
                                                          .with_dtype<int32_t>()
                                                          .with_device(device)
                                                          .verify(req_to_token, "req_to_token"));
    tables.full_to_state = static_cast<const int64_t*>(
        TensorMatcher({kAnySize}).with_dtype<int64_t>().with_device(device).verify(full_to_state, "full_to_state"));
    tables.num_reqs = table_size(req_to_token.size(0));
    tables.width = table_size(req_to_token.size(1));
    tables.req_stride = req_to_token.stride(0);
    tables.num_full_slots = table_size(full_to_state.size(0));
  }

  void take_prefill_lengths(Arguments& args) {
    lengths.seq = take_lengths(args, "seq_lens");
    lengths.extend = take_lengths(args, "extend_lens");
  }

  void take_decode_lengths(Arguments& args) {
    lengths.seq = take_lengths(args, "seq_lens");
  }

  uint32_t count() const {
    return static_cast<uint32_t>(size.unwrap());
  }

 private:
  static uint32_t table_size(int64_t size) {
    return static_cast<uint32_t>(min_of<int64_t>(size, int64_t{1} << 31));
  }

  const int64_t* take_lengths(Arguments& args, const char* name) {
    const TensorView t = args.tensor(name);
    const auto* data = static_cast<const int64_t*>(
        TensorMatcher({size}).with_dtype<int64_t>().with_device(lengths_device).verify(t, name));
    lengths.on_host = lengths_device.is_cpu();
    if (!lengths.on_host) TensorMatcher({size}).with_device(device).verify(t, name);  // the same GPU, too
    return data;
  }
};

/// The rule for lengths that can be read: 0 < extend <= seq < 2^31 for every request, and the sum is num_q_tokens.
void check_prefill_lengths(const Lengths& lengths, uint32_t batch, uint32_t num_q_tokens) {
  int64_t total = 0;
  for (uint32_t i = 0; i < batch; ++i) {
    const int64_t seq = lengths.seq[i];
    const int64_t extend = lengths.extend[i];
    if (!(0 < extend && extend <= seq && seq <= kMaxInt32)) [[unlikely]]
      panic(
          "ValueError",
          "extend_lens, seq_lens: expected 0 < extend <= seq < 2^31 for every request, got extend=", extend,
          ", seq=", seq, " for request ", i);
    total += extend;
  }
  RuntimeCheck(total == num_q_tokens, "num_q_tokens: expected the sum of extend_lens, ", total, ", got ", num_q_tokens);
}

void check_decode_lengths(const Lengths& lengths, uint32_t batch) {
  for (uint32_t i = 0; i < batch; ++i) {
    const int64_t seq = lengths.seq[i];
    RuntimeCheck(
        0 < seq && seq <= kMaxInt32, "seq_lens: expected 0 < seq < 2^31 for every request, got seq=", seq,
        " for request ", i);
  }
}

void check_batch(uint32_t batch) {
  RuntimeCheck(batch <= kMaxBatch, "req_pool_indices: expected at most ", kMaxBatch, " requests, got ", batch);
}

Queue queue_of(const Batch& batch) {
  const DLDevice device = batch.device.unwrap();
  return {device.device_id, host::stream_on(device)};
}

void check_status(Status status) {
  host::check_launch(status, "compress", status_text);
}

struct PlanSet {
  uint32_t count;
  PlanSpec specs[kMaxPlans];
  OptionalTensor outs[kMaxOutputs];  // compress and write of each plan; decode uses the first of each pair
};

PlanSpec take_paged_spec(Arguments& args, bool write_pad) {
  const int64_t ratio = args.integer("compress_ratio");
  const int64_t swa_page_size = args.integer("swa_page_size");
  const int64_t ring_size = args.integer("ring_size");
  const bool use_req_ring = args.boolean("use_req_ring");
  const auto pad = write_pad ? args.optional_integer("write_pad") : std::nullopt;
  RuntimeCheck(!use_req_ring || ratio != 128, "use_req_ring: expected False for compress_ratio=", ratio, ", got True");
  return paged_spec(ratio, swa_page_size, ring_size, pad, use_req_ring);
}

/// What a function reads of its plan: compress_ratio, swa_page_size, ring_size, use_req_ring[, write_pad]; or
/// compress_ratio; or state_slot_offset.
using TakeSpec = PlanSpec (*)(Arguments&);

PlanSpec take_padded(Arguments& args) {
  return take_paged_spec(args, true);
}

PlanSpec take_paged(Arguments& args) {
  return take_paged_spec(args, false);
}

PlanSpec take_legacy(Arguments& args) {
  return legacy_spec(args.integer("compress_ratio"));
}

PlanSpec take_online(Arguments& args) {
  return online_spec(args.integer("state_slot_offset"));
}

/// swa_page_size, use_req_ring, then ratio, ring_size[, write_pad] of each plan. use_req_ring is about ratio 4 alone.
void take_paged_pair(Arguments& args, PlanSet& plans, bool write_pad) {
  const int64_t swa_page_size = args.integer("swa_page_size");
  const bool use_req_ring = args.boolean("use_req_ring");
  for (uint32_t i = 0; i < plans.count; ++i) {
    const int64_t ratio = args.integer("ratios");
    const int64_t ring_size = args.integer("ring_sizes");
    const auto pad = write_pad ? args.optional_integer("write_pad") : std::nullopt;
    plans.specs[i] = paged_spec(ratio, swa_page_size, ring_size, pad, use_req_ring);
  }
}

/// One output: the caller's `out`, or a new tensor where there is none.
struct Output {
  void* data = nullptr;
  uint32_t rows = 0;
  uint32_t bytes = 0;  // of a row
  bool is_new = false;
  std::optional<Tensor> tensor;  // a new one
};

/// At least `rows` rows of `bytes` bytes, in any case where the batch is. New ones get their memory in `allocate`.
Output take_output(Batch& batch, const OptionalTensor& out, const char* name, int64_t rows, int64_t bytes) {
  Output output{.rows = static_cast<uint32_t>(rows), .bytes = static_cast<uint32_t>(bytes), .is_new = !out.has_value()};
  if (output.is_new) return output;
  output.data = TensorMatcher({kAnySize, bytes})
                    .with_dtype<uint8_t>()
                    .with_device(batch.device)
                    .with_alignment(bytes)
                    .verify(*out, name);
  const int64_t have = out->size(0);
  RuntimeCheck(have >= rows && have <= kMaxInt32, name, ": expected at least ", rows, " rows, got ", have);
  output.rows = static_cast<uint32_t>(have);
  return output;
}

/// One allocation for all new outputs: a call of the framework's allocator took 1.4 us, a view of its memory a third.
void allocate(const Batch& batch, Output* outputs, uint32_t count) {
  const auto size_of = [](const Output& o) { return div_ceil<int64_t>(int64_t{o.rows} * o.bytes, 16) * 16; };
  int64_t total = 0;
  for (uint32_t i = 0; i < count; ++i) total += outputs[i].is_new ? size_of(outputs[i]) : 0;
  std::optional<Tensor> memory;
  int64_t used = 0;
  for (uint32_t i = 0; i < count; ++i) {
    Output& o = outputs[i];
    if (!o.is_new) continue;
    if (!memory) memory = host::ffi::empty({&total, 1}, kUInt8, batch.device.unwrap());
    const int64_t shape[] = {o.rows, o.bytes};
    const int64_t strides[] = {o.bytes, 1};
    o.tensor = memory->as_strided({shape, 2}, {strides, 2}, used);
    o.data = o.tensor->data_ptr();
    used += size_of(o);
  }
}

/// The new tensors of a call. A caller who gave `out` has the results already.
Results results_of(const Output* outputs, uint32_t count) {
  Results results;
  for (uint32_t i = 0; i < count; ++i) {
    if (outputs[i].is_new) results.push_back(*outputs[i].tensor);
  }
  return results;
}

// ---------------------------------------------------------------------------------------------------------------------
// Prefill
// ---------------------------------------------------------------------------------------------------------------------

/// Exact row counts of a plan's two outputs, for lengths that can be read.
void count_outputs(const PrefillParams& params, const PlanSpec& spec, int64_t& compress, int64_t& write) {
  compress = write = 0;
  for (uint32_t i = 0; i < params.batch; ++i) {
    const Tokens t =
        tokens_of(spec, RowKind::kWrite, params.lengths.seq[i], params.lengths.extend[i], params.num_q_tokens);
    compress += count_compress(spec, t);
    write += count_write(t);
  }
}

/// Checks the values, sizes and allocates the outputs, and fills them.
Results prefill(Batch& batch, const PlanSet& plans, int64_t num_q_tokens, bool use_cuda_graph) {
  PrefillParams params{};
  params.num_q_tokens = checked_tokens(num_q_tokens);
  params.batch = batch.count();
  check_batch(params.batch);
  params.lengths = batch.lengths;
  params.rid = batch.rid;
  params.tables = batch.tables;
  params.num_outputs = 2 * plans.count;

  const bool empty = params.num_q_tokens == 0;  // an empty micro-batch: whatever the lengths say, nothing to plan
  if (empty) params.batch = 0;
  if (!empty && params.lengths.on_host) check_prefill_lengths(params.lengths, params.batch, params.num_q_tokens);
  const bool exact = params.lengths.on_host && !use_cuda_graph;

  Output outputs[kMaxOutputs];
  uint32_t most_rows = 0;
  for (uint32_t k = 0; k < plans.count; ++k) {
    const PlanSpec& spec = plans.specs[k];
    int64_t rows[2] = {params.num_q_tokens, params.num_q_tokens};
    if (exact) count_outputs(params, spec, rows[0], rows[1]);
    for (uint32_t i = 2 * k; i < 2 * k + 2; ++i) {
      PrefillOutput& target = params.outputs[i];
      target.spec = spec;
      const bool is_write = i % 2 == 1;
      target.kind = is_write ? RowKind::kWrite : RowKind::kCompress;
      target.packed_write = is_write && spec.layout != PlanLayout::kOnline;
      const int64_t bytes = target.packed_write ? sizeof(WriteRow) : sizeof(CompressRow);
      outputs[i] = take_output(batch, plans.outs[i], is_write ? "out.write" : "out.compress", rows[i % 2], bytes);
      target.num_rows = outputs[i].rows;
      most_rows = max_of(most_rows, target.num_rows);
    }
  }
  allocate(batch, outputs, params.num_outputs);
  for (uint32_t i = 0; i < params.num_outputs; ++i) params.outputs[i].rows = outputs[i].data;
  if (most_rows > 0) check_status(run_prefill(params, queue_of(batch)));
  return results_of(outputs, params.num_outputs);
}

/// SGLang's functions have no outputs among their arguments, and a pinned buffer that is not needed here.
enum class Caller { kHotplan, kSGLang };

/// One plan: req_pool_indices, [tables,] lengths, [out | pin_buffer,] num_q_tokens, the plan's own, use_cuda_graph.
Results prefill_one(Arguments& args, bool has_tables, TakeSpec take_spec, Caller caller = Caller::kHotplan) {
  Batch batch;
  PlanSet plans{.count = 1};
  batch.take_requests(args);
  if (has_tables) batch.take_tables(args);
  batch.take_prefill_lengths(args);
  if (caller == Caller::kSGLang) {
    args.skip("pin_buffer");
  } else {
    plans.outs[0] = args.optional_tensor("out.compress");
    plans.outs[1] = args.optional_tensor("out.write");
  }
  const int64_t num_q_tokens = args.integer("num_q_tokens");
  plans.specs[0] = take_spec(args);
  const bool use_cuda_graph = args.boolean("use_cuda_graph");
  args.done();
  return prefill(batch, plans, num_q_tokens, use_cuda_graph);
}

/// hotplan.plan_step_prefill: two ratios in one launch
Results paged_prefill_pair(Arguments& args) {
  Batch batch;
  PlanSet plans{.count = 2};
  batch.take_requests(args);
  batch.take_tables(args);
  batch.take_prefill_lengths(args);
  for (uint32_t i = 0; i < 4; ++i) plans.outs[i] = args.optional_tensor(i % 2 == 0 ? "out.compress" : "out.write");
  const int64_t num_q_tokens = args.integer("num_q_tokens");
  take_paged_pair(args, plans, /*write_pad=*/true);
  const bool use_cuda_graph = args.boolean("use_cuda_graph");
  args.done();
  return prefill(batch, plans, num_q_tokens, use_cuda_graph);
}

Results paged_prefill(Arguments& args) {
  return prefill_one(args, true, take_padded);
}

Results legacy_prefill(Arguments& args) {
  return prefill_one(args, false, take_legacy);
}

Results online_prefill(Arguments& args) {
  return prefill_one(args, false, take_online);
}

// ---------------------------------------------------------------------------------------------------------------------
// Decode
// ---------------------------------------------------------------------------------------------------------------------

Results decode(Batch& batch, const PlanSet& plans) {
  DecodeParams params{};
  params.batch = batch.count();
  params.lengths = batch.lengths;
  params.rid = batch.rid;
  params.tables = batch.tables;
  params.num_outputs = plans.count;
  if (params.lengths.on_host) check_decode_lengths(params.lengths, params.batch);
  Output outputs[kMaxPlans];
  for (uint32_t i = 0; i < plans.count; ++i) {
    outputs[i] = take_output(batch, plans.outs[2 * i], "out", params.batch, sizeof(DecodeRow));
    RuntimeCheck(outputs[i].rows == params.batch, "out: expected ", params.batch, " rows, got ", outputs[i].rows);
  }
  allocate(batch, outputs, plans.count);
  for (uint32_t i = 0; i < plans.count; ++i) {
    params.outputs[i] = {plans.specs[i], static_cast<DecodeRow*>(outputs[i].data)};
  }
  if (params.batch > 0) check_status(run_decode(params, queue_of(batch)));
  return results_of(outputs, plans.count);
}

/// One plan: req_pool_indices, [tables,] seq_lens, [out,] the plan's own.
Results decode_one(Arguments& args, bool has_tables, TakeSpec take_spec, Caller caller = Caller::kHotplan) {
  Batch batch;
  PlanSet plans{.count = 1};
  batch.take_requests(args);
  if (has_tables) batch.take_tables(args);
  batch.take_decode_lengths(args);
  if (caller == Caller::kHotplan) plans.outs[0] = args.optional_tensor("out");
  plans.specs[0] = take_spec(args);
  args.done();
  return decode(batch, plans);
}

/// hotplan.plan_step_decode: two ratios in one launch
Results paged_decode_pair(Arguments& args) {
  Batch batch;
  PlanSet plans{.count = 2};
  batch.take_requests(args);
  batch.take_tables(args);
  batch.take_decode_lengths(args);
  plans.outs[0] = args.optional_tensor("out");
  plans.outs[2] = args.optional_tensor("out");
  take_paged_pair(args, plans, /*write_pad=*/false);
  args.done();
  return decode(batch, plans);
}

Results paged_decode(Arguments& args) {
  return decode_one(args, true, take_paged);
}

Results legacy_decode(Arguments& args) {
  return decode_one(args, false, take_legacy);
}

Results online_decode(Arguments& args) {
  return decode_one(args, false, take_online);
}

// ---------------------------------------------------------------------------------------------------------------------
// Online verify, checked mode
// ---------------------------------------------------------------------------------------------------------------------

/// hotplan.plan_online_verify. The number of active requests is a tensor, or None and an int.
Results online_verify(Arguments& args) {
  Batch batch;
  VerifyParams params{};
  batch.take_requests(args);
  params.batch = batch.count();
  check_batch(params.batch);
  params.rid = batch.rid;
  params.prefix = static_cast<const int32_t*>(TensorMatcher({batch.size})
                                                  .with_dtype<int32_t>()
                                                  .with_device(batch.device)
                                                  .verify(args.tensor("prefix_lens"), "prefix_lens"));
  const auto active = args.optional_tensor("active_batch_size");
  const OptionalTensor outs[2] = {args.optional_tensor("out.compress"), args.optional_tensor("out.write")};
  params.active_value = args.integer("active_batch_size");
  const int64_t num_draft_tokens = args.integer("num_draft_tokens");
  params.plan = online_spec(args.integer("state_slot_offset"));
  args.done();

  if (active.has_value()) {
    auto dtype = SymbolicDType::of<int32_t, int64_t>();
    params.active = TensorMatcher({1}).with_dtype(dtype).with_device(batch.device).verify(*active, "active_batch_size");
    params.active_is_int64 = dtype.is<int64_t>();
  } else {
    RuntimeCheck(
        params.active_value >= 0 && params.active_value <= params.batch,
        "active_batch_size: expected a number in [0, batch=", params.batch, "], got ", params.active_value);
  }
  RuntimeCheck(
      num_draft_tokens >= 1 && num_draft_tokens <= 128, "num_draft_tokens: expected a number in [1, 128], got ",
      num_draft_tokens);
  RuntimeCheck(
      params.batch * num_draft_tokens <= kMaxTokens,
      "num_draft_tokens: expected batch * num_draft_tokens <= ", kMaxTokens, ", got ", params.batch, " * ",
      num_draft_tokens);
  params.num_draft_tokens = static_cast<uint32_t>(num_draft_tokens);

  Output outputs[2];
  for (int i = 0; i < 2; ++i) {
    const char* const name = i == 0 ? "out.compress" : "out.write";
    outputs[i] = take_output(batch, outs[i], name, params.batch, sizeof(CompressRow));
    RuntimeCheck(outputs[i].rows == params.batch, name, ": expected ", params.batch, " rows, got ", outputs[i].rows);
  }
  allocate(batch, outputs, 2);
  params.compress = static_cast<CompressRow*>(outputs[0].data);
  params.write = static_cast<CompressRow*>(outputs[1].data);
  if (params.batch > 0) check_status(run_verify(params, queue_of(batch)));
  return results_of(outputs, 2);
}

/// The checked mode's second half: copies of GPU lengths against the rule for CPU lengths.
Results check_lengths(Arguments& args) {
  SymbolicSize size("batch");
  SymbolicDevice cpu{kDLCPU};
  Lengths lengths{};
  lengths.seq = static_cast<const int64_t*>(
      TensorMatcher({size}).with_dtype<int64_t>().with_device(cpu).verify(args.tensor("seq_lens"), "seq_lens"));
  const auto batch = static_cast<uint32_t>(size.unwrap());
  const auto extend_lens = args.optional_tensor("extend_lens");
  const int64_t num_q_tokens = args.integer("num_q_tokens");
  args.done();
  if (!extend_lens.has_value()) {
    check_decode_lengths(lengths, batch);
    return {};
  }
  lengths.extend = static_cast<const int64_t*>(
      TensorMatcher({size}).with_dtype<int64_t>().with_device(cpu).verify(*extend_lens, "extend_lens"));
  const uint32_t tokens = checked_tokens(num_q_tokens);
  if (tokens != 0) check_prefill_lengths(lengths, batch, tokens);
  return {};
}

// ---------------------------------------------------------------------------------------------------------------------
// SGLang's own names and positional order, so that the module object can stand where SGLang's does.
// ---------------------------------------------------------------------------------------------------------------------

Results sglang_prefill(Arguments& args) {
  return prefill_one(args, true, take_paged, Caller::kSGLang);
}

Results sglang_decode(Arguments& args) {
  return decode_one(args, true, take_paged, Caller::kSGLang);
}

Results sglang_prefill_legacy(Arguments& args) {
  return prefill_one(args, false, take_legacy, Caller::kSGLang);
}

Results sglang_decode_legacy(Arguments& args) {
  return decode_one(args, false, take_legacy, Caller::kSGLang);
}

}  // namespace

SGL_EXPORT(plan_prefill, sglang_prefill)
SGL_EXPORT(plan_decode, sglang_decode)
SGL_EXPORT(plan_prefill_legacy, sglang_prefill_legacy)
SGL_EXPORT(plan_decode_legacy, sglang_decode_legacy)

SGL_EXPORT(paged_prefill, paged_prefill)
SGL_EXPORT(paged_prefill_pair, paged_prefill_pair)
SGL_EXPORT(paged_decode, paged_decode)
SGL_EXPORT(paged_decode_pair, paged_decode_pair)
SGL_EXPORT(legacy_prefill, legacy_prefill)
SGL_EXPORT(legacy_decode, legacy_decode)
SGL_EXPORT(online_prefill, online_prefill)
SGL_EXPORT(online_decode, online_decode)
SGL_EXPORT(online_verify, online_verify)
SGL_EXPORT(check_lengths, check_lengths)

}  // namespace hotplan::compress
