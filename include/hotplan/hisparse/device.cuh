/// \file device.cuh
/// \brief What a launch of a resolution must know of the device, on the host's side.
#pragma once

#include <sgl_kernel/utils.cuh>

#include <hotplan/hisparse/layout.h>

namespace hotplan::hisparse {

/// Clusters of more than eight blocks are not portable.
inline constexpr uint32_t kMostClusterLog2 = 3;

struct Device {
  uint32_t processors;
  uint32_t shared_bytes;                    // that a block of a resolution can have
  uint32_t clusters[kMostClusterLog2 + 1];  // of 2^i blocks: how many are active at once, whatever memory they take
};

/// One SM reads 17 to 23 GB/s from the host; about 16 of them fill PCIe.
inline constexpr uint32_t kEnoughProcessors = 16;

/// Blocks of one launch of the wide route: each has a workspace.
inline constexpr uint32_t kWideBlocks = 256;

using host::device_attribute;

/// Reads what the device can do, and lets the kernels use all its shared memory. The device is current.
template <typename Kernel, typename... Others>
cudaError_t inspect_device(int device, Device& d, Kernel kernel, Others... others) {
  d.processors = device_attribute(cudaDevAttrMultiProcessorCount, device);
  d.shared_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  for (uint32_t& active : d.clusters) active = 0;
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  const auto allow_shared = [&](auto each) {
    if (status != cudaSuccess) return;
    status = cudaFuncSetAttribute(each, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(d.shared_bytes));
  };
  allow_shared(kernel);
  (allow_shared(others), ...);
  if (status != cudaSuccess) return status;
  // Code for an older architecture runs on a newer device, but has no cluster barrier.
  if (attributes.ptxVersion < 90 || device_attribute(cudaDevAttrClusterLaunch, device) == 0) return cudaSuccess;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, 1, 1};
  cudaLaunchConfig_t config{};
  config.blockDim = kResolveThreads;
  config.dynamicSmemBytes = d.shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  for (uint32_t log2 = 1; log2 <= kMostClusterLog2; ++log2) {
    cluster.val.clusterDim.x = config.gridDim.x = 1u << log2;
    int active = 0;
    if (cudaOccupancyMaxActiveClusters(&active, kernel, &config) == cudaSuccess) {
      d.clusters[log2] = static_cast<uint32_t>(active);
    } else {
      cudaGetLastError();  // not an error of the caller's
    }
  }
  return cudaSuccess;
}

/// inspect_device once per device; always with the same kernels in a module.
template <typename... Kernels>
cudaError_t look_up_device(int device, Device& d, Kernels... kernels) {
  return host::once_per_device(device, d, [&](Device& found) { return inspect_device(device, found, kernels...); });
}

/// log2 of the blocks that each of `sets` sets can have. All clusters must be active at once: 32 clusters of four
/// blocks do not fit 132 processors, since a cluster stays inside one of their groups, and took twice the time of 32
/// pairs.
inline uint32_t cluster_for(uint32_t sets, const Device& d) {
  uint32_t log2 = kMostClusterLog2;
  while (log2 > 0 && sets > d.clusters[log2]) --log2;
  return log2;
}

/// Whether rows that begin at `data`, `stride` bytes apart, can be read `pack_bytes` at a time.
inline bool can_vectorize(const void* data, int64_t stride, uint32_t pack_bytes) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride)) % min_of(pack_bytes, 16u) == 0;
}

/// Whether kernels can read the host's memory at `data`: it is pinned, or they can read all of it.
inline bool host_memory_is_readable(const void* data, int device) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.type != cudaMemoryTypeUnregistered ||
         device_attribute(cudaDevAttrPageableMemoryAccess, device) != 0;
}

}  // namespace hotplan::hisparse
