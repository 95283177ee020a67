/// \file entry.cpp
/// \brief The operators of the device-buffer family: check everything, allocate, run. The only file that knows tvm-ffi.
///
/// The same file serves both backends: linked with cpu.cpp it takes CPU tensors, linked with launch.cu CUDA tensors.
/// Argument names in messages are those of the Python functions in `hotplan/hisparse/device_buffer.py`.
#include <hotplan/device_buffer/rules.h>
#include <hotplan/hisparse/plan.h>
#include <sgl_kernel/checks.h>

#include "launch.h"

namespace hotplan::device_buffer {

using hisparse::kMaxHotSlots;
using host::checked_count;
using host::kAnySize;
using host::kBackend;
using host::matrix_of;
using host::OptionalTensor;
using host::panic;
using host::RuntimeCheck;
using host::SizeRef;
using host::SymbolicDevice;
using host::SymbolicDType;
using host::SymbolicSize;
using host::TensorMatcher;
using host::vector_of;
using host::ffi::Arguments;
using host::ffi::Results;
using host::ffi::Tensor;
using host::ffi::TensorView;

namespace {

constexpr int64_t kMinSteps = 2;
constexpr int64_t kMaxSteps = 4;

void check_status(Status status) {
  host::check_launch(status, "device_buffer", status_text);
}

/// A number that SGLang's callers pass and that decides nothing here, or an upper bound.
int64_t at_least_one(int64_t value, const char* name) {
  RuntimeCheck(value >= 1, name, ": expected at least 1, got ", value);
  return value;
}

Integers integers(const TensorView& t, const char* name, SizeRef size, SymbolicDevice& device) {
  auto dtype = SymbolicDType::of<int32_t, int64_t>();
  const void* data = TensorMatcher({size}).with_dtype(dtype).with_device(device).verify(t, name);
  return {data, dtype.is<int64_t>()};
}

/// What the tensors of one call share.
struct Call {
  SymbolicDevice device{kBackend};
  Items items{};

  Queue queue() const {
    const DLDevice d = device.unwrap();
    return {d.device_id, host::stream_on(d)};
  }

  // ------------------------------------------------------------------------------------------------ pools

  void set_item_size(int64_t bytes, const char* name, bool paged = false) {
    items.paged = paged;
    RuntimeCheck(
        bytes >= 1 && bytes <= kMaxInt32, name, ": expected items of 1 to 2147483647 bytes, got ", bytes, " bytes");
    RuntimeCheck(
        !paged || bytes == kPagedItemBytes, name, ": expected ", kPagedItemBytes,
        " bytes, a value and its scale in DeepSeek-V4's pages, got ", bytes);
    items.item_bytes = static_cast<uint32_t>(bytes);
  }

  /// The keys, or with `index` 1 the values of multi-head attention, which must have as many rows.
  void set_pools(
      const TensorView& host, const char* host_name, const TensorView& buffer, const char* buffer_name, int index = 0) {
    const int64_t alignment = items.paged ? kScaleBytes : 1;
    host::verify_device(buffer, buffer_name, device);
    const int64_t device_rows = rows_of(buffer, buffer_name);
    items.device[index] = host::verified_data(buffer, buffer_name, alignment);

    SymbolicDevice cpu{kDLCPU};
    const bool on_host = cpu.match(host.device());
    if (!on_host && !device.match(host.device())) [[unlikely]]
      panic(
          "ValueError", host_name, ": expected device cpu", kBackend == kDLCPU ? "" : " or " + device.text(), ", got ",
          host::device_name(host.device()));
    const int64_t host_rows = rows_of(host, host_name);
    items.host[index] = host::verified_data(host, host_name, alignment);
    RuntimeCheck(
        !on_host || host_rows == 0 || device_can_read(items.host[index], queue()), host_name,
        ": expected pinned memory, which the GPU can read, got pageable memory");

    if (index == 0) {
      items.host_rows = host_rows;
      items.device_rows = device_rows;
    }
    RuntimeCheck(
        host_rows == items.host_rows, host_name, ": expected ", items.host_rows, " rows (those of the keys), got ",
        host_rows);
    RuntimeCheck(
        device_rows == items.device_rows, buffer_name, ": expected ", items.device_rows,
        " rows (those of the keys), got ", device_rows);
  }

  const int32_t* num_real_reqs(Arguments& args) {
    const OptionalTensor t = args.optional_tensor("num_real_reqs");
    if (!t) return nullptr;
    return static_cast<const int32_t*>(
        TensorMatcher({1}).with_dtype<int32_t>().with_device(device).verify(*t, "num_real_reqs"));
  }

 private:
  /// How many items a pool has. Its contents are bytes, whatever dtype and shape it comes in.
  int64_t rows_of(const TensorView& t, const char* name) const {
    RuntimeCheck(t.ndim() >= 1, name, ": expected at least one dimension, got none");
    host::verify_contiguous(t, name);
    const int64_t bytes = t.numel() * host::element_bytes(t);
    if (!items.paged) return bytes / items.item_bytes;
    RuntimeCheck(
        bytes % kPageBytes == 0, name, ": expected whole pages of ", kPageBytes, " bytes, got ", bytes, " bytes");
    return bytes / kPageBytes * kPageSlots;
  }
};

/// Bytes from one row of a contiguous pool to the next.
int64_t row_bytes(const TensorView& t) {
  int64_t bytes = host::element_bytes(t);
  for (int i = 1; i < t.ndim(); ++i) bytes *= t.size(i);
  return bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Swap-in
// ---------------------------------------------------------------------------------------------------------------------

/// What one step and several steps share: the tables of requests and the plan.
struct SwapInCall : Call {
  SwapInParams params{};
  SymbolicSize rows{"bs"};
  SymbolicSize top_k{"K"};
  SymbolicSize states{"reqs"};
  SymbolicSize slots{"H"};

  void take_tables(Arguments& args) {
    const TensorView tokens = args.tensor("device_buffer_tokens");
    const TensorView host_locs = args.tensor("host_cache_locs");
    const TensorView locs = args.tensor("device_buffer_locs");
    SymbolicSize stride("row stride");
    params.tokens = matrix_of<int32_t>(tokens, "device_buffer_tokens", states, width_, device, stride);
    host::require_rows_apart(tokens, "device_buffer_tokens");
    params.locs = matrix_of<int32_t>(locs, "device_buffer_locs", states, width_, device, stride);
    params.buffer_stride = tokens.stride(0);
    params.states = checked_count("device_buffer_tokens", states.unwrap());
    params.host_locs = static_cast<const int64_t*>(TensorMatcher({states, kAnySize})
                                                       .with_dtype<int64_t>()
                                                       .with_device(device)
                                                       .verify(host_locs, "host_cache_locs"));
    RuntimeCheck(
        host_locs.size(1) <= kMaxInt32, "host_cache_locs: expected fewer than 2^31 columns, got ", host_locs.size(1));
    params.max_tokens = static_cast<uint32_t>(host_locs.size(1));
  }

  void take_requests(Arguments& args) {
    params.requests = integers(args.tensor("req_pool_indices"), "req_pool_indices", rows, device);
    const SizeRef lengths = params.steps == 1 ? SizeRef(rows) : SizeRef(rows.unwrap() * params.steps);
    params.lengths = integers(args.tensor("seq_lens"), "seq_lens", lengths, device);
  }

  /// `columns`: of one step; `name`: where H comes from.
  void set_slots(int64_t columns, const char* name) {
    const int64_t h = slots.unwrap();
    RuntimeCheck(
        columns <= h && h <= kMaxHotSlots, name, ": expected at least ", columns,
        " slots (the tokens of a row and step) and at most ", kMaxHotSlots, ", got ", h);
    RuntimeCheck(
        width_.unwrap() > h && width_.unwrap() <= kMaxInt32, "device_buffer_tokens: expected more than H=", h,
        " columns, got ", width_.unwrap());
    params.slots = static_cast<uint32_t>(h);
    params.extra = static_cast<uint32_t>(width_.unwrap() - h);
    params.columns = FastDiv(static_cast<uint32_t>(max_of<int64_t>(columns, 1)));
    plan_columns_ = params.steps * columns;
  }

  void take_plan(Arguments& args) {
    const char* const names[] = {"miss_src", "miss_dst", "miss_count"};
    const OptionalTensor t[] = {
        args.optional_tensor(names[0]), args.optional_tensor(names[1]), args.optional_tensor(names[2])};
    if (!host::all_or_none(t, names)) return;
    SymbolicSize stride("row stride");
    params.miss_src = list<int64_t>(*t[0], names[0], stride);
    params.miss_dst = list<int32_t>(*t[1], names[1], stride);
    params.plan_stride = t[0]->stride(0);
    params.miss_count = vector_of<int32_t>(*t[2], names[2], device, rows.unwrap());
  }

  void run() {
    params.rows = checked_count("req_pool_indices", rows.unwrap());
    if (params.rows == 0 || top_k.unwrap() == 0) return;
    params.items = items;
    const Queue q = queue();
    const host::Workspace workspace(workspace_bytes(params, q), device.unwrap());
    check_status(run_swap_in(params, workspace.data(), q));
  }

 private:
  template <typename T>
  T* list(const TensorView& t, const char* name, SymbolicSize& stride) {
    T* data = matrix_of<T>(t, name, kAnySize, kAnySize, device, stride);
    RuntimeCheck(
        t.size(0) >= rows.unwrap() && t.size(1) >= plan_columns_, name, ": expected at least ", rows.unwrap(),
        " rows and ", plan_columns_, " columns, got shape ", host::shape_text(t.shape()));
    host::require_rows_apart(t, name);
    return data;
  }

  SymbolicSize width_{"H + page"};
  int64_t plan_columns_ = 0;
};

/// hotplan.hisparse.load_cache_to_device_buffer_mla and load_cache_to_device_buffer_dsv4_mla; with `blocks`
/// load_blocks_to_device_buffer_mha, which has two more pools and a block size in the place of num_top_k.
Results load_cache_to_device_buffer(Arguments& args) {
  SwapInCall call;
  SwapInParams& p = call.params;
  p.steps = 1;
  p.padded = -1;
  p.blocks = args.boolean("blocks");
  const bool paged = args.boolean("is_dsv4_layout");
  const int64_t item_size = args.integer("item_size_bytes");
  call.set_item_size(item_size, "item_size_bytes", paged);
  if (p.blocks) {
    const TensorView host_k = args.tensor("host_cache_k");
    const TensorView host_v = args.tensor("host_cache_v");
    const TensorView buffer_k = args.tensor("device_buffer_k");
    const TensorView buffer_v = args.tensor("device_buffer_v");
    const std::pair<const TensorView&, const char*> hosts[] = {{host_k, "host_cache_k"}, {host_v, "host_cache_v"}};
    for (const auto& [host, name] : hosts) {
      RuntimeCheck(
          row_bytes(host) == item_size, name, ": expected rows of item_size_bytes=", item_size, ", got ",
          row_bytes(host), " bytes");
    }
    call.set_pools(host_k, "host_cache_k", buffer_k, "device_buffer_k");
    call.set_pools(host_v, "host_cache_v", buffer_v, "device_buffer_v", 1);
  } else {
    const TensorView host = args.tensor("host_cache");
    call.set_pools(host, "host_cache", args.tensor("device_buffer"), "device_buffer");
  }

  const char* const top_k_name = p.blocks ? "top_k_blocks" : "top_k_tokens";
  const TensorView top_k = args.tensor(top_k_name);
  p.top_k = matrix_of<int32_t>(top_k, top_k_name, call.rows, call.top_k, call.device);
  p.top_k_stride[0] = top_k.stride(0);
  const int64_t entries = call.top_k.unwrap();
  int64_t columns = entries;
  if (p.blocks) {
    const int64_t size = min_of(at_least_one(args.integer("sparse_block_size"), "sparse_block_size"), kMaxHotSlots + 1);
    p.block_tokens = FastDiv(static_cast<uint32_t>(size));
    columns *= size;
  } else {
    const int64_t num_top_k = args.integer("num_top_k");
    RuntimeCheck(
        num_top_k == entries, "num_top_k: expected ", entries, " (the columns of top_k_tokens), got ", num_top_k);
  }
  call.take_tables(args);

  const TensorView out = args.tensor("top_k_device_locs");
  p.out = matrix_of<int32_t>(out, "top_k_device_locs", call.rows, kAnySize, call.device);
  p.out_stride[0] = out.stride(0);
  host::require_rows_apart(out, "top_k_device_locs");
  RuntimeCheck(out.size(1) >= columns, "top_k_device_locs: expected at least ", columns, " columns, got ", out.size(1));
  call.take_requests(args);

  const TensorView lru = args.tensor("lru_slots");
  const int64_t hot_buffer_size = args.integer("hot_buffer_size");
  p.lru = matrix_of<int16_t>(lru, "lru_slots", call.states, call.slots, call.device);
  p.lru_stride = lru.stride(0);
  host::require_rows_apart(lru, "lru_slots");
  RuntimeCheck(
      hot_buffer_size == call.slots.unwrap(), "hot_buffer_size: expected ", call.slots.unwrap(),
      " (the columns of lru_slots), got ", hot_buffer_size);
  call.set_slots(columns, "hot_buffer_size");
  at_least_one(args.integer("page_size"), "page_size");
  at_least_one(args.integer("block_size"), "block_size");
  p.num_real = call.num_real_reqs(args);
  call.take_plan(args);
  p.skip_io = args.boolean("skip_io");
  args.done();
  call.run();
  return {};
}

/// For an output [rows, steps, columns]: its rows and steps do not lie upon each other.
void require_steps_apart(const TensorView& t, const char* name) {
  const int64_t extent = (t.size(1) - 1) * t.stride(1) + t.size(2);
  RuntimeCheck(
      t.numel() == 0 || (t.stride(1) >= t.size(2) && (t.size(0) <= 1 || t.stride(0) >= extent)), name,
      ": expected steps and rows that do not overlap, got strides ", host::shape_text(t.strides()));
}

/// hotplan.hisparse.load_cache_to_device_buffer_spec_mla
Results load_cache_to_device_buffer_spec(Arguments& args) {
  SwapInCall call;
  SwapInParams& p = call.params;
  p.padded = 0;  // what upstream writes and its callers let pass
  const TensorView host = args.tensor("host_cache");
  call.set_item_size(row_bytes(host), "host_cache");
  call.set_pools(host, "host_cache", args.tensor("device_buffer"), "device_buffer");

  SymbolicSize steps("steps");
  const auto matcher = [&] {
    return TensorMatcher({call.rows, steps, call.top_k})
        .with_strides({kAnySize, kAnySize, 1})
        .with_dtype<int32_t>()
        .with_device(call.device);
  };
  const TensorView top_k = args.tensor("top_k_tokens");
  p.top_k = static_cast<const int32_t*>(matcher().verify(top_k, "top_k_tokens"));
  RuntimeCheck(
      steps.unwrap() >= kMinSteps && steps.unwrap() <= kMaxSteps, "top_k_tokens: expected ", kMinSteps, " to ",
      kMaxSteps, " steps, got ", steps.unwrap());
  p.steps = static_cast<uint32_t>(steps.unwrap());
  call.take_tables(args);
  const TensorView out = args.tensor("top_k_device_locs");
  p.out = static_cast<int32_t*>(matcher().verify(out, "top_k_device_locs"));
  require_steps_apart(out, "top_k_device_locs");
  for (int i = 0; i < 2; ++i) {
    p.top_k_stride[i] = top_k.stride(i);
    p.out_stride[i] = out.stride(i);
  }
  call.take_requests(args);

  // One row of cache_policy per request behind the first; a row of scratch_locs and a counter in scratch_state.
  const TensorView policy = args.tensor("state.cache_policy");
  const TensorView scratch = args.tensor("state.scratch_locs");
  const TensorView state = args.tensor("state.scratch_state");
  const int64_t reqs = call.states.unwrap();
  auto* lru = matrix_of<int32_t>(policy, "state.cache_policy", kAnySize, call.slots, call.device);
  host::require_rows_apart(policy, "state.cache_policy");
  RuntimeCheck(
      policy.size(0) > reqs, "state.cache_policy: expected at least ", reqs + 1, " rows, got ", policy.size(0));
  p.lru_stride = policy.stride(0);
  p.lru = lru + p.lru_stride;
  call.set_slots(call.top_k.unwrap(), "state.cache_policy");
  p.scratch = matrix_of<int32_t>(scratch, "state.scratch_locs", kAnySize, kAnySize, call.device);
  RuntimeCheck(scratch.size(0) >= reqs, "state.scratch_locs: expected at least ", reqs, " rows, got ", scratch.size(0));
  p.scratch_stride = scratch.stride(0);
  p.scratch_rows = static_cast<uint32_t>(min_of(scratch.size(1), kMaxInt32));
  p.state_misses = matrix_of<int32_t>(state, "state.scratch_state", kAnySize, kAnySize, call.device);
  RuntimeCheck(
      state.size(0) >= 1 && state.size(1) >= reqs, "state.scratch_state: expected at least 1 row and ", reqs,
      " columns, got shape ", host::shape_text(state.shape()));
  p.num_real = call.num_real_reqs(args);
  call.take_plan(args);
  args.done();
  call.run();
  return {};
}

// ---------------------------------------------------------------------------------------------------------------------
// Copies
// ---------------------------------------------------------------------------------------------------------------------

/// hotplan.hisparse.copy_cache_planned_mla
Results copy_cache_planned(Arguments& args) {
  Call call;
  PlannedCopyParams p{};
  const bool paged = args.boolean("is_dsv4_layout");
  call.set_item_size(args.integer("item_size_bytes"), "item_size_bytes", paged);
  const TensorView host = args.tensor("host_cache");
  call.set_pools(host, "host_cache", args.tensor("device_buffer"), "device_buffer");
  SymbolicSize rows("bs");
  SymbolicSize capacity("capacity");
  SymbolicSize stride("row stride");
  const TensorView src = args.tensor("miss_src");
  p.miss_src = matrix_of<int64_t>(src, "miss_src", rows, capacity, call.device, stride);
  p.miss_dst = matrix_of<int32_t>(args.tensor("miss_dst"), "miss_dst", rows, capacity, call.device, stride);
  p.miss_count = vector_of<int32_t>(args.tensor("miss_count"), "miss_count", call.device, rows.unwrap());
  p.plan_stride = src.stride(0);
  p.rows = checked_count("miss_src", rows.unwrap());
  p.capacity = static_cast<uint32_t>(min_of(capacity.unwrap(), kMaxInt32));
  p.num_real = call.num_real_reqs(args);
  p.blocks = static_cast<uint32_t>(min_of(at_least_one(args.integer("num_blocks"), "num_blocks"), kMaxInt32));
  at_least_one(args.integer("block_size"), "block_size");
  p.skip_io = args.boolean("skip_io");
  args.done();
  p.items = call.items;
  if (p.rows > 0 && p.capacity > 0) check_status(run_planned_copy(p, call.queue()));
  return {};
}

/// hotplan.hisparse.transfer_cache_dsv4_mla
Results transfer_cache_dsv4_mla(Arguments& args) {
  Call call;
  TransferParams p{};
  SymbolicSize layers("layers");
  SymbolicSize count("N");
  const auto pointers = [&](const char* name) {
    return static_cast<const uint64_t*>(
        TensorMatcher({layers}).with_dtype<uint64_t>().with_device(call.device).verify(args.tensor(name), name));
  };
  const auto indices = [&](const char* name) {
    return static_cast<const int64_t*>(
        TensorMatcher({count}).with_dtype<int64_t>().with_device(call.device).verify(args.tensor(name), name));
  };
  p.src_ptrs = pointers("src_ptrs");
  p.dst_ptrs = pointers("dst_ptrs");
  p.src_indices = indices("src_indices");
  p.dst_indices = indices("dst_indices");
  at_least_one(args.integer("block_size"), "block_size");
  args.done();
  p.layers = checked_count("src_ptrs", layers.unwrap());
  const uint32_t items = checked_count("src_indices", count.unwrap());
  if (p.layers == 0 || items == 0) return {};
  p.items = FastDiv(items);
  check_status(run_transfer(p, call.queue()));
  return {};
}

// ---------------------------------------------------------------------------------------------------------------------
// Translation
// ---------------------------------------------------------------------------------------------------------------------

/// hotplan.hisparse.translate_padded_hisparse_locations
Results translate_padded_hisparse_locations(Arguments& args) {
  Call call;
  TranslateParams p{};
  const TensorView mapping = args.tensor("mapping");
  p.mapping = integers(mapping, "mapping", kAnySize, call.device);
  p.mapping_size = mapping.size(0);
  const TensorView locations = args.tensor("locations");
  auto dtype = SymbolicDType::of<int32_t, int64_t>();
  p.locations.data = TensorMatcher({kAnySize})
                         .with_strides({kAnySize})
                         .with_dtype(dtype)
                         .with_device(call.device)
                         .verify(locations, "locations");
  p.locations.wide = dtype.is<int64_t>();
  p.stride = locations.stride(0);
  p.count = locations.size(0);
  args.done();
  p.wide_out = p.mapping.wide || p.locations.wide;
  const DLDataType promoted = p.wide_out ? host::dtype_of<int64_t>() : host::dtype_of<int32_t>();
  const Tensor out = host::ffi::empty({&p.count, 1}, promoted, call.device.unwrap());
  p.out = out.data_ptr();
  if (p.count > 0) check_status(run_translate(p, call.queue()));
  return {out};
}

}  // namespace

SGL_EXPORT(load_cache_to_device_buffer, load_cache_to_device_buffer)
SGL_EXPORT(load_cache_to_device_buffer_spec, load_cache_to_device_buffer_spec)
SGL_EXPORT(copy_cache_planned, copy_cache_planned)
SGL_EXPORT(transfer_cache_dsv4_mla, transfer_cache_dsv4_mla)
SGL_EXPORT(translate_padded_hisparse_locations, translate_padded_hisparse_locations)

}  // namespace hotplan::device_buffer
