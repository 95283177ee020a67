/// \file launch.cu
/// \brief The CUDA backend: instantiates the kernels and chooses routes. Results do not depend on the route.
#include <sgl_kernel/utils.cuh>

#include <hotplan/device_buffer/copies.cuh>
#include <hotplan/device_buffer/load.cuh>
#include <hotplan/hisparse/device.cuh>

#include "launch.h"

namespace hotplan::device_buffer {

namespace {

using hisparse::can_vectorize;
using hisparse::Device;
using hisparse::kResolveThreads;
using hisparse::kSlotPack;
using hisparse::kWideBlocks;
using hisparse::SetPlan;
using host::DeviceGuard;
using host::LaunchKernel;

Status device_of(int device, Device& d) {
  return hisparse::look_up_device(
      device, d, load_kernel<false, Span::kTile>, load_kernel<false, Span::kLoop>, load_kernel<true, Span::kLoop>);
}

template <bool kSteps>
SetPlan plan_of(const SwapInParams& p, const Device& d) {
  SetPlan plan = hisparse::plan_set(Request<kSteps>::shape(p), d.shared_bytes);
  if (kSteps && plan.span == Span::kTile) plan.span = Span::kLoop;  // one kernel for all sets of several steps
  return plan;
}

SetPlan plan_of(const SwapInParams& p, const Device& d) {
  return p.steps == 1 ? plan_of<false>(p, d) : plan_of<true>(p, d);
}

template <bool kSteps>
Status launch_load(const SwapInParams& p, const SetPlan& plan, const Device& d, char* workspace, cudaStream_t stream) {
  LoadLaunch launch{};
  launch.piece_bytes = piece_bytes(p.items);
  hisparse::SetLaunch& set = launch.set;
  set.layout = plan.layout;
  set.workspace = workspace;
  set.copy = !p.skip_io;
  const uint32_t lru_bytes = sizeof(typename Request<kSteps>::LruSlot);
  const bool whole_columns = p.columns.divisor % kColumnPack == 0;
  const bool whole_slots = p.slots % kSlotPack == 0;
  set.vector_columns =
      whole_columns && can_vectorize(p.top_k, (p.top_k_stride[0] | p.top_k_stride[1]) * 4, 4 * kColumnPack);
  set.vector_out = whole_columns && can_vectorize(p.out, (p.out_stride[0] | p.out_stride[1]) * 4, 4 * kColumnPack);
  set.vector_lru = whole_slots && can_vectorize(p.lru, p.lru_stride * lru_bytes, lru_bytes * kSlotPack);
  set.vector_held = whole_slots && can_vectorize(p.tokens, p.buffer_stride * 4, 4 * kSlotPack);
  if (plan.span != Span::kWide) {
    set.cluster_log2 = hisparse::cluster_for(p.rows, d);
    LaunchKernel kernel(p.rows << set.cluster_log2, kResolveThreads, stream, set.layout.bytes);
    if (set.cluster_log2 != 0) kernel.enable_cluster(1u << set.cluster_log2);
    if constexpr (!kSteps) {
      if (plan.span == Span::kTile) return kernel(load_kernel<false, Span::kTile>, p, launch);
    }
    return kernel(load_kernel<kSteps, Span::kLoop>, p, launch);
  }
  for (; launch.first_row < p.rows; launch.first_row += kWideBlocks) {
    const uint32_t blocks = min_of(p.rows - launch.first_row, kWideBlocks);
    const Status status = LaunchKernel(blocks, kResolveThreads, stream)(load_kernel<kSteps, Span::kWide>, p, launch);
    if (status != 0) return status;
  }
  return 0;
}

}  // namespace

bool device_can_read(const void* host, Queue queue) {
  return hisparse::host_memory_is_readable(host, queue.device);
}

int64_t workspace_bytes(const SwapInParams& p, Queue queue) {
  const DeviceGuard guard(queue.device);
  Device d;
  if (guard.status() != cudaSuccess || device_of(queue.device, d) != 0) return 0;  // the launch will say why
  const SetPlan plan = plan_of(p, d);
  return plan.span == Span::kWide ? static_cast<int64_t>(plan.layout.bytes) * min_of(p.rows, kWideBlocks) : 0;
}

Status run_swap_in(const SwapInParams& p, char* workspace, Queue queue) {
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  Device d;
  const Status status = device_of(queue.device, d);
  if (status != 0) return status;
  const SetPlan plan = plan_of(p, d);
  return p.steps == 1 ? launch_load<false>(p, plan, d, workspace, queue.stream)
                      : launch_load<true>(p, plan, d, workspace, queue.stream);
}

Status run_planned_copy(const PlannedCopyParams& p, Queue queue) {
  if (p.skip_io) return 0;
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  const uint32_t segment_rows = clamp_to<uint32_t>(
      static_cast<uint32_t>(kMaxInt32) / p.capacity, 1, min_of(PlannedCopies::Rows::kMostRows, p.rows));
  // More blocks than that would find no work, even if all were misses.
  const int64_t most = div_ceil<int64_t>(int64_t{p.capacity} * segment_rows, kPlannedThreads / kWarp);
  const auto blocks = static_cast<uint32_t>(min_of<int64_t>(p.blocks, most));
  return LaunchKernel(blocks, kPlannedThreads, queue.stream)(
      copy_planned_kernel, p, segment_rows, piece_bytes(p.items));
}

Status run_transfer(const TransferParams& p, Queue queue) {
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  // A quarter of the processors fills the bus: with another loop inside 33 blocks took 160 to 173 us for 256 items of
  // 43 layers, 66 of them 187 to 193 and 132 of them 176 to 179.
  const uint32_t processors = hisparse::device_attribute(cudaDevAttrMultiProcessorCount, queue.device);
  const uint32_t layers = static_cast<uint32_t>(kMaxInt32) / p.items.divisor;  // of a launch: its items are 31 bits
  TransferParams part = p;
  for (uint32_t first = 0; first < p.layers; first += part.layers) {
    part.src_ptrs = p.src_ptrs + first;
    part.dst_ptrs = p.dst_ptrs + first;
    part.layers = min_of(p.layers - first, layers);
    const int64_t rows = int64_t{part.layers} * p.items.divisor;  // a warp each
    const auto blocks = static_cast<uint32_t>(
        min_of<int64_t>(div_ceil<int64_t>(rows, kTransferThreads / kWarp), div_ceil(processors, 4u)));
    const Status status = LaunchKernel(blocks, kTransferThreads, queue.stream)(transfer_kernel, part);
    if (status != 0) return status;
  }
  return 0;
}

Status run_translate(const TranslateParams& p, Queue queue) {
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  const auto blocks = static_cast<uint32_t>(div_ceil<int64_t>(p.count, kTranslateThreads));
  return LaunchKernel(blocks, kTranslateThreads, queue.stream)(translate_kernel, p);
}

const char* status_text(Status status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

}  // namespace hotplan::device_buffer
