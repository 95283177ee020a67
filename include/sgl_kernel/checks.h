/// \file checks.h
/// \brief What the operators of several families check alike, and the backend that they are compiled for.
#pragma once

#include <sgl_kernel/ffi.h>
#include <sgl_kernel/tensor.h>
#include <sgl_kernel/utils.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

struct CUstream_st;  // cudaStream_t points to one

namespace host {

using OptionalTensor = std::optional<ffi::TensorView>;

inline constexpr DLDeviceType kBackend = HOTPLAN_BACKEND_CUDA ? kDLCUDA : kDLCPU;
inline constexpr DLDataType kUInt8 = {kDLUInt, 8, 1};

/// The caller's stream; the CPU backend has none.
inline CUstream_st* stream_on(DLDevice device) {
  return kBackend == kDLCPU ? nullptr : static_cast<CUstream_st*>(ffi::current_stream(device));
}

/// What a kernel wants beside its tensors; no memory where it wants none. Must live until the launch.
class Workspace {
 public:
  Workspace(int64_t bytes, DLDevice device) {
    if (bytes > 0) tensor_ = ffi::empty({&bytes, 1}, kUInt8, device);
  }
  char* data() const {
    return tensor_ ? static_cast<char*>(tensor_->data_ptr()) : nullptr;
  }

 private:
  std::optional<ffi::Tensor> tensor_;
};

/// `status_text` says what a backend's status means; 0 is success.
inline void check_launch(int status, const char* family, const char* (*status_text)(int)) {
  if (status != 0) [[unlikely]]
    panic("RuntimeError", "hotplan ", family, " kernel failed to launch: ", status_text(status));
}

inline int64_t element_bytes(const ffi::TensorView& t) {
  return (t.dtype().bits * t.dtype().lanes + 7) / 8;
}

[[noreturn]] inline void expected_tensor(const char* name, const std::string& why) {
  panic("ValueError", name, ": expected a tensor, ", why, ", got None");
}

inline uint32_t checked_count(const char* name, int64_t count) {
  RuntimeCheck(count <= std::numeric_limits<int32_t>::max(), name, ": expected fewer than 2^31 rows, got ", count);
  return static_cast<uint32_t>(count);
}

/// A contiguous vector of at least `least` elements.
template <typename T>
T* vector_of(const ffi::TensorView& t, const char* name, SymbolicDevice& device, int64_t least = 0) {
  auto* data = static_cast<T*>(TensorMatcher({kAnySize}).with_dtype<T>().with_device(device).verify(t, name));
  RuntimeCheck(t.size(0) >= least, name, ": expected at least ", least, " elements, got ", t.size(0));
  return data;
}

/// A matrix with a free row stride, or one that other matrices have, too.
template <typename T>
T* matrix_of(
    const ffi::TensorView& t, const char* name, SizeRef rows, SizeRef columns, SymbolicDevice& device,
    SizeRef row_stride = kAnySize) {
  return static_cast<T*>(
      TensorMatcher({rows, columns}).with_strides({row_stride, 1}).with_dtype<T>().with_device(device).verify(t, name));
}

/// For matrices that are written: rows do not lie upon each other.
inline void require_rows_apart(const ffi::TensorView& t, const char* name) {
  RuntimeCheck(
      t.size(0) <= 1 || t.size(1) == 0 || t.stride(0) >= t.size(1), name, ": expected a row stride of at least ",
      t.size(1), ", got ", t.stride(0));
}

/// Three tensors that make sense together only. Returns whether they are there.
inline bool all_or_none(const OptionalTensor (&t)[3], const char* const (&names)[3]) {
  if (!t[0] && !t[1] && !t[2]) return false;
  for (int i = 0; i < 3; ++i) {
    if (!t[i]) expected_tensor(names[i], std::string("or none of ") + names[0] + ", " + names[1] + " and " + names[2]);
  }
  return true;
}

}  // namespace host
