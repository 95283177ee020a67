/// \file ptx.cuh
/// \brief The instructions that C++ has no words for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace hotplan::hisparse {

/// The dynamic shared memory of the block.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ __align__(16) char hotplan_shared[];
  return hotplan_shared;
}

/// The barrier of a thread-block cluster in two halves: what is between them hides the wait. Kernels are launched as
/// clusters only where they were compiled for sm_90 or later.
/// It keeps what a thread has read and used before it arrives apart from what others write after the wait. No stores
/// are handed over, hence "relaxed": a release would wait until all stores of the block have reached L2.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// 4 bytes from global to shared memory without a register on the way. async_wait: those of this thread have arrived.
__device__ __forceinline__ void async_copy_4(void* shared, const void* global) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// Reads of host memory: each byte once, so past L1. A predicate instead of a branch, so that a batch of them is under
/// way before the first is waited for; 0 where it is false.
__device__ __forceinline__ void load_host(uint4& x, const char* from, bool wanted) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "r"(static_cast<uint32_t>(wanted)));
}

__device__ __forceinline__ void load_host(uint32_t& x, uint32_t& y, const char* from, bool wanted) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];\n\t}"
      : "=&r"(x), "=&r"(y)
      : "l"(from), "r"(static_cast<uint32_t>(wanted)));
}

__device__ __forceinline__ void load_host(uint32_t& x, const char* from, bool wanted) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.b32 %0, [%1];\n\t}"
      : "=&r"(x)
      : "l"(from), "r"(static_cast<uint32_t>(wanted)));
}

__device__ __forceinline__ void load_host_byte(uint32_t& x, const char* from, bool wanted) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.u8 %0, [%1];\n\t}"
      : "=&r"(x)
      : "l"(from), "r"(static_cast<uint32_t>(wanted)));
}

}  // namespace hotplan::hisparse
