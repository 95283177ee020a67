/// \file launch.cu
/// \brief The CUDA backend: instantiates the kernels and chooses routes. Results do not depend on the route.
#include <sgl_kernel/utils.cuh>

#include <hotplan/hisparse/device.cuh>
#include <hotplan/hisparse/gather.cuh>
#include <hotplan/hisparse/resolve.cuh>

#include "launch.h"

namespace hotplan::hisparse {

namespace {

using host::DeviceGuard;
using host::LaunchKernel;

Status device_of(int device, Device& d) {
  return look_up_device(device, d, resolve_kernel<Span::kTile>, resolve_kernel<Span::kLoop>);
}

// ---------------------------------------------------------------------------------------------------------------------
// Routes
// ---------------------------------------------------------------------------------------------------------------------

/// Largest piece in which rows can be copied.
uint32_t piece_bytes(const Caches& c) {
  const auto bits = reinterpret_cast<uintptr_t>(c.host) | reinterpret_cast<uintptr_t>(c.hot) |
                    static_cast<uintptr_t>(c.block_stride) | static_cast<uintptr_t>(c.row_bytes);
  return piece_width(bits);
}

struct Route {
  SetPlan set;
  bool fused;          // the resolution copies
  bool owns_lists;     // the copies' lists are ours: the caller has none
  int64_t wide_bytes;  // of workspace; the lists lie behind
  int64_t list_bytes;
  uint32_t cluster_log2;
};

Route choose_route(const ResolveParams& p, bool copy, const Device& d) {
  Route r{};
  r.set = plan_set(Residency::shape(p), d.shared_bytes);
  const bool wide = r.set.span == Span::kWide;
  if (wide) r.wide_bytes = static_cast<int64_t>(r.set.layout.bytes) * min_of(p.rows, kWideBlocks);
  if (!copy) return r;
  const uint32_t sets = div_ceil(p.rows, Residency::max_rows(p));
  if (!wide && piece_bytes(p.caches) == 16) {
    r.cluster_log2 = cluster_for(sets, d);
    r.fused = r.cluster_log2 > 0 || sets >= kEnoughProcessors;
  }
  if (!r.fused && p.swap_host == nullptr) {
    r.owns_lists = true;
    r.list_bytes = (2 * static_cast<int64_t>(p.top_k.divisor) + 1) * p.rows * static_cast<int64_t>(sizeof(int32_t));
  }
  return r;
}

Status launch_resolve(const ResolveParams& p, const Route& r, char* workspace, cudaStream_t stream) {
  ResolveLaunch launch{};
  SetLaunch& set = launch.set;
  set.cluster_log2 = r.cluster_log2;
  const bool whole_columns = p.top_k.divisor % kColumnPack == 0;
  const bool whole_slots = p.hot_slots % kSlotPack == 0;
  set.vector_columns = whole_columns && can_vectorize(p.ids, p.ids_stride * 4, 4 * kColumnPack);
  set.vector_out =
      whole_columns && can_vectorize(p.hot, 0, 4 * kColumnPack) && can_vectorize(p.mask, 0, 4 * kColumnPack);
  set.vector_lru = whole_slots && can_vectorize(p.lru, 0, 2 * kSlotPack);
  set.vector_held = whole_slots && can_vectorize(p.dgi, 0, 4 * kSlotPack);
  set.copy = r.fused;
  set.workspace = workspace;
  set.layout = r.set.layout;
  if (r.set.span != Span::kWide) {
    LaunchKernel kernel(p.rows << r.cluster_log2, kResolveThreads, stream, set.layout.bytes);
    if (r.cluster_log2 != 0) kernel.enable_cluster(1u << r.cluster_log2);
    return kernel(r.set.span == Span::kTile ? resolve_kernel<Span::kTile> : resolve_kernel<Span::kLoop>, p, launch);
  }
  for (; launch.first_row < p.rows; launch.first_row += kWideBlocks) {
    const uint32_t blocks = min_of(p.rows - launch.first_row, kWideBlocks);
    const Status status = LaunchKernel(blocks, kResolveThreads, stream)(resolve_kernel<Span::kWide>, p, launch);
    if (status != 0) return status;
  }
  return 0;
}

Status gather(const GatherParams& p, cudaStream_t stream) {
  const uint32_t width = piece_bytes(p.caches);
  if (p.mask != nullptr) {
    const uint32_t tiles = div_ceil(p.top_k, kMaskThreads);
    return LaunchKernel(tiles * p.rows, kMaskThreads, stream)(gather_masked_kernel, p, tiles, width);
  }
  // Twice the SMs that fill the bus, or fewer, where a block would not have one row for each warp.
  const uint32_t segment_rows =
      clamp_to<uint32_t>(static_cast<uint32_t>(kMaxInt32) / p.top_k, 1, min_of(kSegmentRows, p.rows));
  const int64_t most = div_ceil<int64_t>(int64_t{p.top_k} * segment_rows, kGatherThreads / kWarp);
  const auto blocks = static_cast<uint32_t>(min_of<int64_t>(most, 2 * kEnoughProcessors));
  const dim3 grid(blocks, div_ceil(p.rows, segment_rows));
  return LaunchKernel(grid, kGatherThreads, stream)(gather_lists_kernel, p, segment_rows, width);
}

Status resolve(ResolveParams p, bool copy, char* workspace, Queue queue) {
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  Device d;
  Status status = device_of(queue.device, d);
  if (status != 0) return status;
  const Route r = choose_route(p, copy, d);
  if (r.owns_lists) {
    const int64_t entries = static_cast<int64_t>(p.top_k.divisor) * p.rows;
    p.swap_host = reinterpret_cast<int32_t*>(workspace + r.wide_bytes);
    p.swap_device = p.swap_host + entries;
    p.swap_counts = p.swap_device + entries;
  }
  status = launch_resolve(p, r, workspace, queue.stream);
  if (status != 0 || !copy || r.fused) return status;
  GatherParams g{};
  g.caches = p.caches;
  g.rows = p.rows;
  g.top_k = p.top_k.divisor;
  g.host_rows = p.swap_host;
  g.hot_rows = p.swap_device;
  g.counts = p.swap_counts;
  return gather(g, queue.stream);
}

}  // namespace

bool device_can_read(const void* host, Queue queue) {
  return host_memory_is_readable(host, queue.device);
}

int64_t workspace_bytes(const ResolveParams& p, bool copy, Queue queue) {
  const DeviceGuard guard(queue.device);
  Device d;
  if (guard.status() != cudaSuccess || device_of(queue.device, d) != 0) return 0;  // the launch will say why
  const Route r = choose_route(p, copy, d);
  return r.wide_bytes + r.list_bytes;
}

Status run_resolve(const ResolveParams& p, char* workspace, Queue queue) {
  return resolve(p, false, workspace, queue);
}

Status run_swap_in(const ResolveParams& p, char* workspace, Queue queue) {
  return resolve(p, true, workspace, queue);
}

Status run_gather(const GatherParams& p, Queue queue) {
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  return gather(p, queue.stream);
}

Status run_invalidate(const InvalidateParams& p, Queue queue) {
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  const bool vector = p.hot_slots % 4 == 0 && reinterpret_cast<uintptr_t>(p.dgi) % 16 == 0;
  return LaunchKernel(p.tokens, kInvalidateThreads, queue.stream)(invalidate_kernel, p, vector);
}

const char* status_text(Status status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

}  // namespace hotplan::hisparse
