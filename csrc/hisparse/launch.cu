/// \file launch.cu
/// \brief The CUDA backend: instantiates the kernels and chooses routes. Results do not depend on the route.
#include <sgl_kernel/utils.cuh>

#include <hotplan/hisparse/gather.cuh>
#include <hotplan/hisparse/resolve.cuh>

#include "launch.h"

namespace hotplan::hisparse {

namespace {

using host::DeviceGuard;
using host::LaunchKernel;

cudaStream_t stream_of(Queue queue) {
  return static_cast<cudaStream_t>(queue.stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The device
// ---------------------------------------------------------------------------------------------------------------------

struct Device {
  uint32_t processors;
  uint32_t shared_bytes;  // that a block of resolve_kernel can have
  uint32_t cluster_log2;  // blocks of the largest cluster
};

uint32_t attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, which, device);
  return static_cast<uint32_t>(value);
}

/// Reads what the device can do, and lets resolve_kernel use all its shared memory. The device is current.
Status inspect(int device, Device& d) {
  const auto kernel = resolve_kernel<false>;
  d.processors = attribute(cudaDevAttrMultiProcessorCount, device);
  d.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  d.cluster_log2 = 0;
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(d.shared_bytes));
  if (status != cudaSuccess) return status;
  // Code for an older architecture runs on a newer device, but has no cluster barrier.
  if (attributes.ptxVersion < 90 || attribute(cudaDevAttrClusterLaunch, device) == 0) return 0;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {8, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = 8;
  config.blockDim = kResolveThreads;
  config.dynamicSmemBytes = d.shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  for (uint32_t log2 = 3; log2 > 0; --log2) {
    cluster.val.clusterDim.x = config.gridDim.x = 1u << log2;
    int active = 0;
    if (cudaOccupancyMaxActiveClusters(&active, kernel, &config) == cudaSuccess && active > 0) {
      d.cluster_log2 = log2;
      break;
    }
    cudaGetLastError();  // not an error of the caller's
  }
  return 0;
}

/// What is known of a device. Threads that race for the first look find the same.
Status device_of(int device, Device& d) {
  static constexpr int kDevices = 64;
  static Device known[kDevices];
  static bool ready[kDevices];
  if (device < 0 || device >= kDevices) return inspect(device, d);
  if (!__atomic_load_n(&ready[device], __ATOMIC_ACQUIRE)) {
    const Status status = inspect(device, d);
    if (status != 0) return status;
    if (!__atomic_load_n(&ready[device], __ATOMIC_ACQUIRE)) {
      known[device] = d;
      __atomic_store_n(&ready[device], true, __ATOMIC_RELEASE);
    }
    return 0;
  }
  d = known[device];
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Routes
// ---------------------------------------------------------------------------------------------------------------------

/// One SM reads 17 to 23 GB/s from the host; about 16 of them fill PCIe.
constexpr uint32_t kEnoughProcessors = 16;

/// Blocks of one launch of the wide route: each has a workspace.
constexpr uint32_t kWideBlocks = 256;

/// Largest piece in which rows can be copied.
uint32_t piece_bytes(const Caches& c) {
  const auto bits = reinterpret_cast<uintptr_t>(c.host) | reinterpret_cast<uintptr_t>(c.hot) |
                    static_cast<uintptr_t>(c.block_stride) | static_cast<uintptr_t>(c.row_bytes);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
}

struct Route {
  bool wide;           // in global memory, where shared memory is too small
  bool fused;          // the resolution copies
  bool owns_lists;     // the copies' lists are ours: the caller has none
  int64_t wide_bytes;  // of workspace; the lists lie behind
  int64_t list_bytes;
  uint32_t cluster_log2;
  ResolveLayout layout;
};

Route choose_route(const ResolveParams& p, bool copy, const Device& d) {
  Route r{};
  const bool unions = p.max_union_rows > 0 && p.request_ids != nullptr;
  const uint32_t run_rows = unions ? min_of(p.max_union_rows, p.rows) : 1;
  const uint32_t top_k = p.top_k.divisor;
  const uint32_t pages = div_ceil(p.hot_slots, p.caches.block_size.divisor);
  const auto layout_of = [&](uint32_t table_factor, bool wide) {
    return resolve_layout(run_rows, top_k, p.hot_slots, pages, table_factor, wide);
  };
  // A roomy table where it fits, or a tight one.
  r.layout = layout_of(4, false);
  if (r.layout.bytes > d.shared_bytes) r.layout = layout_of(2, false);
  r.wide = r.layout.bytes > d.shared_bytes || run_rows * top_k > kMaxNarrowReferences;
  if (r.wide) {
    r.layout = layout_of(2, true);
    r.wide_bytes = static_cast<int64_t>(r.layout.bytes) * min_of(p.rows, kWideBlocks);
  }
  if (!copy) return r;
  const uint32_t sets = div_ceil(p.rows, run_rows);
  if (!r.wide && piece_bytes(p.caches) == 16) {
    while (r.cluster_log2 < d.cluster_log2 && (sets << (r.cluster_log2 + 1)) <= d.processors) ++r.cluster_log2;
    r.fused = r.cluster_log2 > 0 || sets >= kEnoughProcessors;
  }
  if (!r.fused && p.swap_host == nullptr) {
    r.owns_lists = true;
    r.list_bytes = (2 * static_cast<int64_t>(top_k) + 1) * p.rows * static_cast<int64_t>(sizeof(int32_t));
  }
  return r;
}

Status launch_resolve(const ResolveParams& p, const Route& r, char* workspace, cudaStream_t stream) {
  ResolveLaunch launch{};
  launch.cluster_log2 = r.cluster_log2;
  launch.vector_state =
      p.hot_slots % 8 == 0 && (reinterpret_cast<uintptr_t>(p.lru) | reinterpret_cast<uintptr_t>(p.dgi)) % 16 == 0;
  launch.copy = r.fused;
  launch.workspace = workspace;
  launch.layout = r.layout;
  if (!r.wide) {
    LaunchKernel kernel(p.rows << r.cluster_log2, kResolveThreads, stream, r.layout.bytes);
    if (r.cluster_log2 != 0) kernel.enable_cluster(1u << r.cluster_log2);
    return kernel(resolve_kernel<false>, p, launch);
  }
  for (; launch.first_row < p.rows; launch.first_row += kWideBlocks) {
    const uint32_t blocks = min_of(p.rows - launch.first_row, kWideBlocks);
    const Status status = LaunchKernel(blocks, kResolveThreads, stream)(resolve_kernel<true>, p, launch);
    if (status != 0) return status;
  }
  return 0;
}

template <typename Word>
Status launch_gather(const GatherParams& p, cudaStream_t stream) {
  if (p.mask != nullptr) {
    const uint32_t tiles = div_ceil(p.top_k, kMaskThreads);
    return LaunchKernel(tiles * p.rows, kMaskThreads, stream)(gather_masked_kernel<Word>, p, tiles);
  }
  // Twice the SMs that fill the bus, or fewer, where a block would not have one load for each thread.
  const uint32_t segment_rows =
      clamp_to<uint32_t>(static_cast<uint32_t>(kMaxInt32) / p.top_k, 1, min_of(kSegmentRows, p.rows));
  const int64_t pieces = p.caches.row_bytes / sizeof(Word) * p.top_k * segment_rows;
  const auto blocks =
      static_cast<uint32_t>(min_of<int64_t>(div_ceil<int64_t>(pieces, kGatherThreads), 2 * kEnoughProcessors));
  const dim3 grid(blocks, div_ceil(p.rows, segment_rows));
  return LaunchKernel(grid, kGatherThreads, stream)(gather_lists_kernel<Word>, p, segment_rows);
}

Status gather(const GatherParams& p, cudaStream_t stream) {
  switch (piece_bytes(p.caches)) {
    case 16:
      return launch_gather<uint4>(p, stream);
    case 4:
      return launch_gather<uint32_t>(p, stream);
    default:
      return launch_gather<uint8_t>(p, stream);
  }
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
  status = launch_resolve(p, r, workspace, stream_of(queue));
  if (status != 0 || !copy || r.fused) return status;
  GatherParams g{};
  g.caches = p.caches;
  g.rows = p.rows;
  g.top_k = p.top_k.divisor;
  g.host_rows = p.swap_host;
  g.hot_rows = p.swap_device;
  g.counts = p.swap_counts;
  return gather(g, stream_of(queue));
}

}  // namespace

bool device_can_read(const char* host, Queue queue) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, host) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.type != cudaMemoryTypeUnregistered || attribute(cudaDevAttrPageableMemoryAccess, queue.device) != 0;
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
  return gather(p, stream_of(queue));
}

Status run_invalidate(const InvalidateParams& p, Queue queue) {
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  const bool vector = p.hot_slots % 4 == 0 && reinterpret_cast<uintptr_t>(p.dgi) % 16 == 0;
  return LaunchKernel(p.tokens, kInvalidateThreads, stream_of(queue))(invalidate_kernel, p, vector);
}

const char* status_text(Status status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

}  // namespace hotplan::hisparse
