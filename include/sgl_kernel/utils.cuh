/// \file utils.cuh
/// \brief Kernel launch of the idiom: grid, block, stream, shared memory, cluster and programmatic dependent launch.
///
/// Without tvm-ffi: nvcc parses its headers twice, which takes longer than all of our kernels. Hence a stream instead
/// of a DLDevice, and a cudaError_t instead of an exception.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace host {

class LaunchKernel {
 public:
  LaunchKernel(dim3 grid, dim3 block, cudaStream_t stream, std::size_t shared_bytes = 0) {
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.stream = stream;
    config_.dynamicSmemBytes = shared_bytes;
    config_.attrs = attributes_;
  }
  LaunchKernel(const LaunchKernel&) = delete;

  /// The kernel may start before its predecessor on the stream has ended; it must call griddepcontrol.wait itself.
  LaunchKernel& enable_pdl(bool enabled = true) {
    if (!enabled) return *this;
    auto& attribute = attributes_[config_.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return *this;
  }

  LaunchKernel& enable_cluster(dim3 cluster) {
    auto& attribute = attributes_[config_.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster.x;
    attribute.val.clusterDim.y = cluster.y;
    attribute.val.clusterDim.z = cluster.z;
    return *this;
  }

  template <typename... Params, typename... Args>
  cudaError_t operator()(void (*kernel)(Params...), Args&&... args) const {
    return cudaLaunchKernelEx(&config_, kernel, std::forward<Args>(args)...);
  }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[2];
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

}  // namespace host
