/// \file utils.cuh
/// \brief Kernel launch of the idiom: grid, block, stream, shared memory and cluster; what is asked once per device.
///
/// Without tvm-ffi: nvcc parses its headers twice, which takes longer than all of our kernels. Hence a stream instead
/// of a DLDevice, and a cudaError_t instead of an exception.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace host {

class LaunchKernel {
 public:
  LaunchKernel(dim3 grid, dim3 block, cudaStream_t stream, std::size_t shared_bytes = 0) {
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.stream = stream;
    config_.dynamicSmemBytes = shared_bytes;
    config_.attrs = &attribute_;
  }
  LaunchKernel(const LaunchKernel&) = delete;

  LaunchKernel& enable_cluster(dim3 cluster) {
    config_.numAttrs = 1;
    attribute_.id = cudaLaunchAttributeClusterDimension;
    attribute_.val.clusterDim.x = cluster.x;
    attribute_.val.clusterDim.y = cluster.y;
    attribute_.val.clusterDim.z = cluster.z;
    return *this;
  }

  template <typename... Params, typename... Args>
  cudaError_t operator()(void (*kernel)(Params...), Args&&... args) const {
    return cudaLaunchKernelEx(&config_, kernel, std::forward<Args>(args)...);
  }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attribute_{};
};

/// Makes `device` current for the scope, and restores what was.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    status_ = cudaGetDevice(&previous_);
    if (status_ == cudaSuccess && previous_ != device) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  cudaError_t status() const {
    return status_;
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t status_;
};

inline uint32_t device_attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, which, device);
  return static_cast<uint32_t>(value);
}

/// What inspect(T&) finds about a device, asked for once: one T for each type of `inspect`, so a lambda. Threads that
/// race for the first look find the same; a failure is not kept.
template <typename T, typename Inspect>
cudaError_t once_per_device(int device, T& found, Inspect&& inspect) {
  static constexpr int kDevices = 64;
  static T known[kDevices];
  static bool ready[kDevices];
  if (device < 0 || device >= kDevices) return inspect(found);
  if (!__atomic_load_n(&ready[device], __ATOMIC_ACQUIRE)) {
    const cudaError_t status = inspect(found);
    if (status == cudaSuccess && !__atomic_load_n(&ready[device], __ATOMIC_ACQUIRE)) {
      known[device] = found;
      __atomic_store_n(&ready[device], true, __ATOMIC_RELEASE);
    }
    return status;
  }
  found = known[device];
  return cudaSuccess;
}

}  // namespace host
