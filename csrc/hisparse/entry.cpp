/// \file entry.cpp
/// \brief The operators of the HiSparse family: check everything, allocate, run. The only file that knows tvm-ffi.
///
/// The same file serves both backends: linked with cpu.cpp it takes CPU tensors, linked with launch.cu CUDA tensors.
/// Argument names in messages are those of the Python functions in `hotplan/hisparse/residency.py`.
#include <sgl_kernel/checks.h>

#include "launch.h"

namespace hotplan::hisparse {

using host::all_or_none;
using host::checked_count;
using host::expected_tensor;
using host::kAnySize;
using host::kBackend;
using host::kUInt8;
using host::OptionalTensor;
using host::panic;
using host::RuntimeCheck;
using host::SymbolicDevice;
using host::SymbolicSize;
using host::TensorMatcher;
using host::ffi::Arguments;
using host::ffi::Results;
using host::ffi::TensorView;

namespace {

constexpr DLDataType kInt32 = {kDLInt, 32, 1};

/// From here on a block size or stride sends every index but those of block 0 past int32, whatever its exact value.
constexpr int64_t kHuge = kMaxInt32 + 1;

/// Columns of a union, so that its arrays have 32-bit offsets.
constexpr int64_t kMaxReferences = int64_t{1} << 27;

int64_t row_bytes_of(const TensorView& t) {
  return t.size(t.ndim() - 1) * host::element_bytes(t);
}

std::string shape_and_strides(const TensorView& t) {
  return "shape " + host::shape_text(t.shape()) + " with strides " + host::shape_text(t.strides());
}

/// What the tensors of one call share.
struct Call {
  SymbolicSize rows{"R"};
  SymbolicSize top_k{"K"};
  SymbolicSize states{"S"};
  SymbolicSize slots{"H"};
  SymbolicDevice device{kBackend};
  Caches caches{};

  Queue queue() const {
    const DLDevice d = device.unwrap();
    return {d.device_id, host::stream_on(d)};
  }

  // ------------------------------------------------------------------------------------------------ the two pools

  void take_caches(Arguments& args, bool flat_allowed) {
    const TensorView host_cache = args.tensor("host_cache");
    const TensorView hot_cache = args.tensor("hot_cache");
    if (flat_allowed && hot_cache.ndim() == 2) {
      caches.hot = static_cast<char*>(TensorMatcher({kAnySize, kAnySize})
                                          .with_strides({kAnySize, 1})
                                          .with_device(device)
                                          .verify(hot_cache, "hot_cache"));
    } else {
      caches.hot = static_cast<char*>(TensorMatcher({kAnySize, kAnySize, kAnySize})
                                          .with_strides({kAnySize, kAnySize, 1})
                                          .with_device(device)
                                          .verify(hot_cache, "hot_cache"));
    }
    SymbolicDevice cpu{kDLCPU};
    caches.host =
        static_cast<const char*>(TensorMatcher({kAnySize, kAnySize}).with_device(cpu).verify(host_cache, "host_cache"));

    const bool flat = hot_cache.ndim() == 2;
    const int64_t blocks = hot_cache.size(0);
    const int64_t block_size = flat ? 1 : hot_cache.size(1);
    const int64_t width = hot_cache.size(hot_cache.ndim() - 1);
    caches.row_bytes = row_bytes_of(hot_cache);
    RuntimeCheck(
        caches.row_bytes > 0 && caches.row_bytes % 16 == 0,
        "hot_cache: expected rows of a positive multiple of 16 bytes, got ", caches.row_bytes, " bytes");
    RuntimeCheck(
        caches.row_bytes <= kMaxInt32, "hot_cache: expected rows of fewer than 2^31 bytes, got ", caches.row_bytes);
    RuntimeCheck(
        row_bytes_of(host_cache) == caches.row_bytes, "host_cache: expected rows of ", caches.row_bytes,
        " bytes (those of hot_cache), got ", row_bytes_of(host_cache), " bytes");
    RuntimeCheck(block_size > 0, "hot_cache: expected a block size of at least 1, got ", block_size);
    if (flat) {
      RuntimeCheck(
          blocks <= 1 || hot_cache.stride(0) == width, "hot_cache: expected contiguous rows, got ",
          shape_and_strides(hot_cache));
    } else {
      RuntimeCheck(
          (block_size == 1 || hot_cache.stride(1) == width) &&
              (blocks <= 1 || hot_cache.stride(0) >= block_size * width),
          "hot_cache: expected contiguous rows inside a block and blocks that do not overlap, got ",
          shape_and_strides(hot_cache));
    }
    RuntimeCheck(
        blocks < kMaxInt32 && block_size < kMaxInt32 && blocks * block_size < kMaxInt32,
        "hot_cache: expected fewer than 2^31 - 1 rows, got ", blocks, " blocks of ", block_size);
    caches.host_rows = host_cache.size(0);
    caches.block_stride = hot_cache.stride(0) * (caches.row_bytes / width);
    caches.block_size = FastDiv(static_cast<uint32_t>(block_size));
    caches.blocks = static_cast<uint32_t>(blocks);
    caches.hot_rows = static_cast<uint32_t>(blocks * block_size);
  }

  /// For operators that copy: the kernel reads the host pool through its own address.
  void require_readable_pool() const {
    RuntimeCheck(
        caches.host_rows == 0 || device_can_read(caches.host, queue()),
        "host_cache: expected pinned memory, which the GPU can read, got pageable memory");
  }

  // ------------------------------------------------------------------------------------------------ index tensors

  /// int32 [R, K], contiguous.
  int32_t* matrix(const TensorView& t, const char* name) {
    return static_cast<int32_t*>(
        TensorMatcher({rows, top_k}).with_dtype<int32_t>().with_device(device).verify(t, name));
  }

  int32_t* optional_matrix(Arguments& args, const char* name) {
    const OptionalTensor t = args.optional_tensor(name);
    return t ? matrix(*t, name) : nullptr;
  }

  /// int32 [R, K] with a free row stride.
  int32_t* strided_matrix(const TensorView& t, const char* name) {
    return host::matrix_of<int32_t>(t, name, rows, top_k, device);
  }

  /// int32, contiguous, at least `least` long.
  int32_t* vector(const TensorView& t, const char* name, int64_t least = 0) {
    return host::vector_of<int32_t>(t, name, device, least);
  }

  BlockTable table(const TensorView& t, const char* name) {
    const auto* data = host::matrix_of<int32_t>(t, name, kAnySize, kAnySize, device);
    // A table without entries may have no memory; its `data` must still say that there is a table.
    static const int32_t no_entries = -1;
    const auto rows_of = [](int64_t size) { return static_cast<uint32_t>(min_of(size, kMaxInt32)); };
    return {data ? data : &no_entries, t.stride(0), rows_of(t.size(0)), rows_of(t.size(1))};
  }

  int64_t attention_block_stride(int64_t stride) const {
    RuntimeCheck(
        stride >= caches.block_size.divisor, "attention_block_stride: expected at least ", caches.block_size.divisor,
        " (the block size of hot_cache), got ", stride);
    return min_of(stride, kHuge);
  }
};

void check_status(Status status) {
  host::check_launch(status, "hisparse", status_text);
}

// ---------------------------------------------------------------------------------------------------------------------
// Resolution
// ---------------------------------------------------------------------------------------------------------------------

struct ResolveCall : Call {
  ResolveParams params{};
  bool has_hot_indices;  // given; plan_swap_in allocates it
  bool has_swap_lists;

  void take(Arguments& args, bool hot_indices, bool swap_lists) {
    has_hot_indices = hot_indices;
    has_swap_lists = swap_lists;
    take_caches(args, /*flat_allowed=*/false);
    params.caches = caches;
    const TensorView hot_block_table = args.tensor("hot_block_table");
    take_ids(args);
    if (has_hot_indices) params.hot = matrix(args.tensor("hot_indices"), "hot_indices");
    take_state(args);
    params.tables.hot = table(hot_block_table, "hot_block_table");
    const int64_t pages = div_ceil<int64_t>(params.hot_slots, caches.block_size.divisor);
    RuntimeCheck(
        hot_block_table.size(1) >= pages, "hot_block_table: expected at least ", pages,
        " columns for H=", params.hot_slots, " slots in blocks of ", caches.block_size.divisor, ", got ",
        hot_block_table.size(1));
    take_requests(args);
    params.mask = optional_matrix(args, "miss_mask");
    take_stats(args);
    take_attention(args);
    take_source(args);
    RuntimeCheck(
        params.request_ids != nullptr || hot_block_table.size(0) >= rows.unwrap(),
        "hot_block_table: expected at least ", rows.unwrap(), " rows, got ", hot_block_table.size(0));
    params.resolved = optional_matrix(args, "resolved_global_indices");
    take_valid(args);
    if (has_swap_lists) take_swap_lists(args);
    take_resident(args);
    const int64_t most = min_of<int64_t>(params.max_union_rows, params.rows) * params.top_k.divisor;
    RuntimeCheck(
        params.request_ids == nullptr || most <= kMaxReferences, "max_union_rows: expected at most ", kMaxReferences,
        " columns in a union, got ", most);
  }

  bool empty() const {
    return rows.unwrap() == 0 || top_k.unwrap() == 0;
  }

  /// A union that is too long or too large is seen before anything is written, where its ids can be read.
  void check_unions() const {
    if constexpr (kBackend == kDLCPU) {
      UnionFault fault;
      if (!find_union_fault(params, fault)) return;
      const uint32_t last = fault.first_row + fault.rows - 1;
      RuntimeCheck(
          !fault.too_long, "request_ids: expected at most max_union_rows=", params.max_union_rows,
          " adjacent rows of one request, got ", fault.rows, " rows of request ", fault.request, " from row ",
          fault.first_row);
      panic(
          "ValueError", "global_indices: expected at most H=", params.hot_slots, " distinct ids in a union, got ",
          fault.distinct, " in rows ", fault.first_row, " to ", last, " of request ", fault.request);
    }
  }

  void run(bool copy) const {
    if (empty()) return;
    check_unions();
    const Queue q = queue();
    const host::Workspace workspace(workspace_bytes(params, copy, q), device.unwrap());
    check_status(copy ? run_swap_in(params, workspace.data(), q) : run_resolve(params, workspace.data(), q));
  }

 private:
  void take_ids(Arguments& args) {
    const TensorView ids = args.tensor("global_indices");
    params.ids = strided_matrix(ids, "global_indices");
    params.ids_stride = ids.stride(0);
    params.rows = checked_count("global_indices", rows.unwrap());
    params.top_k = FastDiv(static_cast<uint32_t>(clamp_to<int64_t>(top_k.unwrap(), 1, kMaxInt32)));
  }

  void take_state(Arguments& args) {
    params.dgi = static_cast<int32_t*>(TensorMatcher({states, slots})
                                           .with_dtype<int32_t>()
                                           .with_device(device)
                                           .verify(args.tensor("device_global_indices"), "device_global_indices"));
    RuntimeCheck(
        top_k.unwrap() <= slots.unwrap() && slots.unwrap() <= kMaxHotSlots,
        "device_global_indices: expected K <= H <= ", kMaxHotSlots, " with K=", top_k.unwrap(),
        ", got H=", slots.unwrap());
    params.lru = static_cast<int16_t*>(TensorMatcher({states, slots})
                                           .with_dtype<int16_t>()
                                           .with_device(device)
                                           .verify(args.tensor("lru_slots"), "lru_slots"));
    params.hot_slots = static_cast<uint32_t>(slots.unwrap());
    params.state_rows = checked_count("device_global_indices", states.unwrap());
  }

  void take_requests(Arguments& args) {
    if (const OptionalTensor t = args.optional_tensor("request_state_indices")) {
      static const int32_t none = -1;
      params.request_states = vector(*t, "request_state_indices");
      params.num_request_states = static_cast<uint32_t>(min_of(t->size(0), kMaxInt32));
      if (params.request_states == nullptr) params.request_states = &none;
    }
    const auto region_stride = args.optional_integer("region_stride");
    RuntimeCheck(
        !region_stride || *region_stride == slots.unwrap(), "region_stride: expected H=", slots.unwrap(),
        " or None, got ", region_stride.value_or(0));
    const auto max_union_rows = args.optional_integer("max_union_rows");
    RuntimeCheck(
        !max_union_rows || *max_union_rows >= 1, "max_union_rows: expected None or at least 1, got ",
        max_union_rows.value_or(0));
    params.max_union_rows = static_cast<uint32_t>(min_of(max_union_rows.value_or(0), kMaxInt32));
  }

  void take_stats(Arguments& args) {
    if (const OptionalTensor t = args.optional_tensor("stats")) {
      auto counter = host::SymbolicDType::of<int64_t, uint64_t>();
      params.stats =
          static_cast<uint64_t*>(TensorMatcher({2}).with_dtype(counter).with_device(device).verify(*t, "stats"));
    }
  }

  void take_attention(Arguments& args) {
    const OptionalTensor t = args.optional_tensor("attention_indices");
    const int64_t stride = args.integer("attention_block_stride");
    if (!t) return;
    params.attention = strided_matrix(*t, "attention_indices");
    host::require_rows_apart(*t, "attention_indices");
    params.attention_stride = t->stride(0);
    params.attention_block_stride = attention_block_stride(stride);
  }

  void take_source(Arguments& args) {
    const OptionalTensor request_ids = args.optional_tensor("request_ids");
    const OptionalTensor source = args.optional_tensor("source_block_table");
    const int64_t size = args.integer("source_block_size");
    if (request_ids && !source) expected_tensor("source_block_table", "because request_ids is given");
    if (source && !request_ids) expected_tensor("request_ids", "because source_block_table is given");
    params.tables.id_limit = static_cast<uint32_t>(min_of(caches.host_rows, kHuge));
    if (!source) return;
    params.request_ids = vector(*request_ids, "request_ids", rows.unwrap());
    params.tables.source = table(*source, "source_block_table");
    RuntimeCheck(size >= 1, "source_block_size: expected at least 1, got ", size);
    params.tables.source_block_size = FastDiv(static_cast<uint32_t>(min_of(size, kHuge)));
  }

  void take_valid(Arguments& args) {
    const OptionalTensor t = args.optional_tensor("valid_counts");
    if (!t) return;
    params.valid = static_cast<int32_t*>(TensorMatcher({rows})
                                             .with_strides({kAnySize})
                                             .with_dtype<int32_t>()
                                             .with_device(device)
                                             .verify(*t, "valid_counts"));
    params.valid_stride = t->stride(0);
    RuntimeCheck(
        t->size(0) <= 1 || t->stride(0) >= 1, "valid_counts: expected a stride of at least 1, got ", t->stride(0));
  }

  void take_swap_lists(Arguments& args) {
    const char* const names[] = {"swap_host_physical_rows", "swap_device_physical_rows", "swap_counts"};
    const OptionalTensor t[] = {
        args.optional_tensor(names[0]), args.optional_tensor(names[1]), args.optional_tensor(names[2])};
    if (!all_or_none(t, names)) return;
    params.swap_host = matrix(*t[0], names[0]);
    params.swap_device = matrix(*t[1], names[1]);
    params.swap_counts = vector(*t[2], names[2], rows.unwrap());
  }

  void take_resident(Arguments& args) {
    const OptionalTensor t = args.optional_tensor("resident_block_table");
    const int64_t block_size = args.integer("resident_block_size");
    const int64_t null_block = args.integer("resident_null_block");
    if (!t) return;
    if (params.tables.source.data == nullptr) {
      expected_tensor("source_block_table", "because resident_block_table is given");
    }
    params.tables.resident = table(*t, "resident_block_table");
    RuntimeCheck(
        block_size == caches.block_size.divisor, "resident_block_size: expected ", caches.block_size.divisor,
        " (the block size of hot_cache), got ", block_size);
    RuntimeCheck(null_block >= 0, "resident_null_block: expected at least 0, got ", null_block);
    params.tables.resident_null = fit_int32(null_block);
  }
};

/// hotplan.hisparse.resolve_residency
Results resolve_residency(Arguments& args) {
  ResolveCall call;
  call.take(args, /*hot_indices=*/true, /*swap_lists=*/true);
  args.done();
  call.run(/*copy=*/false);
  return {};
}

/// hotplan.hisparse.swap_in
Results swap_in(Arguments& args) {
  ResolveCall call;
  call.take(args, /*hot_indices=*/true, /*swap_lists=*/true);
  args.done();
  call.require_readable_pool();
  call.run(/*copy=*/true);
  return {};
}

/// One output: the caller's `out`, or a new tensor where there is none, which becomes a result.
template <typename Check>
void* take_output(
    const OptionalTensor& out, const char* name, tvm::ffi::ShapeView shape, DLDataType dtype, DLDevice device,
    Results& results, Check&& check) {
  if (out) return check(*out, name);
  results.push_back(host::ffi::empty(shape, dtype, device));
  return results[results.size() - 1].data_ptr();
}

/// hotplan.hisparse.plan_swap_in: after the arguments that it shares with the others come plan, counts and hot_indices.
Results plan_swap_in(Arguments& args) {
  ResolveCall call;
  call.take(args, /*hot_indices=*/false, /*swap_lists=*/false);
  const OptionalTensor outs[] = {
      args.optional_tensor("out.plan"), args.optional_tensor("out.counts"), args.optional_tensor("out.hot_indices")};
  args.done();
  const DLDevice device = call.device.unwrap();
  const int64_t shape[] = {call.rows.unwrap(), call.top_k.unwrap(), sizeof(SwapRow)};
  Results results;
  const auto check_plan = [&](const TensorView& t, const char* name) {
    return TensorMatcher({call.rows, call.top_k, static_cast<int64_t>(sizeof(SwapRow))})
        .with_dtype<uint8_t>()
        .with_device(call.device)
        .with_alignment(sizeof(SwapRow))
        .verify(t, name);
  };
  const auto check_counts = [&](const TensorView& t, const char* name) {
    return TensorMatcher({call.rows}).with_dtype<int32_t>().with_device(call.device).verify(t, name);
  };
  const auto check_hot = [&](const TensorView& t, const char* name) -> void* { return call.matrix(t, name); };
  ResolveParams& p = call.params;
  p.plan = static_cast<SwapRow*>(take_output(outs[0], "out.plan", {shape, 3}, kUInt8, device, results, check_plan));
  p.swap_counts =
      static_cast<int32_t*>(take_output(outs[1], "out.counts", {shape, 1}, kInt32, device, results, check_counts));
  p.hot =
      static_cast<int32_t*>(take_output(outs[2], "out.hot_indices", {shape, 2}, kInt32, device, results, check_hot));
  call.run(/*copy=*/false);
  return results;
}

/// The checked mode's second half: the arguments of a CUDA call as CPU tensors, against the rule for those.
Results check_unions(Arguments& args) {
  ResolveCall call;
  call.take(args, /*hot_indices=*/true, /*swap_lists=*/true);
  args.done();
  if (!call.empty()) call.check_unions();
  return {};
}

// ---------------------------------------------------------------------------------------------------------------------
// Copies of a layer
// ---------------------------------------------------------------------------------------------------------------------

struct GatherCall : Call {
  GatherParams params{};

  void take_pools(Arguments& args, bool flat_allowed) {
    take_caches(args, flat_allowed);
    params.caches = caches;
  }

  void run() {
    params.rows = checked_count("hot_indices", rows.unwrap());
    params.top_k = checked_count("hot_indices", top_k.unwrap());
    require_readable_pool();
    if (params.rows > 0 && params.top_k > 0) check_status(run_gather(params, queue()));
  }
};

/// hotplan.hisparse.gather_plan
Results gather_plan(Arguments& args) {
  GatherCall call;
  call.take_pools(args, /*flat_allowed=*/true);
  call.params.host_rows = call.matrix(args.tensor("global_indices"), "global_indices");
  call.params.hot_rows = call.matrix(args.tensor("hot_indices"), "hot_indices");
  call.params.mask = call.matrix(args.tensor("miss_mask"), "miss_mask");
  const OptionalTensor states = args.optional_tensor("request_state_indices");
  if (states) call.params.row_states = call.vector(*states, "request_state_indices", call.rows.unwrap());
  call.params.attention = call.optional_matrix(args, "attention_indices");
  const int64_t stride = args.integer("attention_block_stride");
  if (call.params.attention) call.params.attention_block_stride = call.attention_block_stride(stride);
  args.done();
  call.run();
  return {};
}

/// hotplan.hisparse.gather_compact
Results gather_compact(Arguments& args) {
  GatherCall call;
  call.take_pools(args, /*flat_allowed=*/false);
  call.params.host_rows = call.matrix(args.tensor("miss_global_indices"), "miss_global_indices");
  call.params.hot_rows = call.matrix(args.tensor("miss_hot_indices"), "miss_hot_indices");
  call.params.counts = call.vector(args.tensor("miss_counts"), "miss_counts", call.rows.unwrap());
  args.done();
  call.run();
  return {};
}

/// hotplan.hisparse.gather_planned
Results gather_planned(Arguments& args) {
  GatherCall call;
  call.take_pools(args, /*flat_allowed=*/false);
  call.params.plan =
      static_cast<const SwapRow*>(TensorMatcher({call.rows, call.top_k, static_cast<int64_t>(sizeof(SwapRow))})
                                      .with_dtype<uint8_t>()
                                      .with_device(call.device)
                                      .with_alignment(sizeof(SwapRow))
                                      .verify(args.tensor("plan"), "plan"));
  call.params.counts = call.vector(args.tensor("counts"), "counts", call.rows.unwrap());
  args.done();
  call.run();
  return {};
}

/// hotplan.hisparse.invalidate_written_slots
Results invalidate_written_slots(Arguments& args) {
  Call call;
  SymbolicSize tokens("T");
  InvalidateParams p{};
  p.dgi = static_cast<int32_t*>(TensorMatcher({call.states, call.slots})
                                    .with_dtype<int32_t>()
                                    .with_device(call.device)
                                    .verify(args.tensor("device_global_indices"), "device_global_indices"));
  const TensorView states = args.tensor("request_state_indices");
  p.request_states = call.vector(states, "request_state_indices");
  const TensorView requests = args.tensor("req_id_per_token");
  const TensorView written = args.tensor("written_slots");
  p.written = static_cast<const int64_t*>(
      TensorMatcher({tokens}).with_dtype<int64_t>().with_device(call.device).verify(written, "written_slots"));
  p.request_of_token = static_cast<const int32_t*>(
      TensorMatcher({tokens}).with_dtype<int32_t>().with_device(call.device).verify(requests, "req_id_per_token"));
  args.done();
  p.state_rows = checked_count("device_global_indices", call.states.unwrap());
  p.hot_slots = checked_count("device_global_indices", call.slots.unwrap());
  p.num_request_states = static_cast<uint32_t>(min_of(states.size(0), kMaxInt32));
  p.tokens = checked_count("written_slots", tokens.unwrap());
  if (p.tokens > 0 && p.state_rows > 0 && p.hot_slots > 0) check_status(run_invalidate(p, call.queue()));
  return {};
}

}  // namespace

SGL_EXPORT(resolve_residency, resolve_residency)
SGL_EXPORT(swap_in, swap_in)
SGL_EXPORT(plan_swap_in, plan_swap_in)
SGL_EXPORT(check_unions, check_unions)
SGL_EXPORT(gather_plan, gather_plan)
SGL_EXPORT(gather_compact, gather_compact)
SGL_EXPORT(gather_planned, gather_planned)
SGL_EXPORT(invalidate_written_slots, invalidate_written_slots)

}  // namespace hotplan::hisparse
