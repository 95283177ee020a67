/// \file ffi.h
/// \brief The border to tvm-ffi: arguments by name, results, the framework's allocator and the caller's stream.
///
/// Functions are exported in tvm-ffi's packed form and read their arguments one by one. tvm-ffi's typed export unpacks
/// them with templates, which took almost 6 of the 8 seconds that g++ needed for fourteen functions, and its errors
/// count arguments where these name them.
#pragma once

#include <sgl_kernel/utils.h>

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>
#include <optional>

namespace host::ffi {

using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

/// The arguments of one call, taken in order.
class Arguments {
 public:
  Arguments(const char* function, const TVMFFIAny* args, int32_t count)
      : function_(function), args_(args), count_(count) {}

  TensorView tensor(const char* name) {
    const DLTensor* t = as_tensor(next(name));
    if (t == nullptr) [[unlikely]]
      fail(name, "a tensor");
    return TensorView(t);
  }

  std::optional<TensorView> optional_tensor(const char* name) {
    const TVMFFIAny& arg = next(name);
    if (arg.type_index == kTVMFFINone) return std::nullopt;
    const DLTensor* t = as_tensor(arg);
    if (t == nullptr) [[unlikely]]
      fail(name, "a tensor or None");
    return TensorView(t);
  }

  int64_t integer(const char* name) {
    const TVMFFIAny& arg = next(name);
    if (arg.type_index != kTVMFFIInt) [[unlikely]]
      fail(name, "an int");
    return arg.v_int64;
  }

  std::optional<int64_t> optional_integer(const char* name) {
    const TVMFFIAny& arg = next(name);
    if (arg.type_index == kTVMFFINone) return std::nullopt;
    if (arg.type_index != kTVMFFIInt) [[unlikely]]
      fail(name, "an int or None");
    return arg.v_int64;
  }

  bool boolean(const char* name) {
    const TVMFFIAny& arg = next(name);
    if (arg.type_index != kTVMFFIBool && arg.type_index != kTVMFFIInt) [[unlikely]]
      fail(name, "a bool");
    return arg.v_int64 != 0;
  }

  void skip(const char* name) {
    next(name);
  }

  /// Call after the last argument was taken.
  void done() const {
    if (index_ != count_) [[unlikely]]
      panic("TypeError", function_, ": expected ", index_, " arguments, got ", count_);
  }

 private:
  const TVMFFIAny& next(const char* name) {
    if (index_ >= count_) [[unlikely]]
      panic("TypeError", function_, ": argument ", name, " is missing, got ", count_, " arguments");
    return args_[index_++];
  }

  static const DLTensor* as_tensor(const TVMFFIAny& arg) {
    if (arg.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(arg.v_ptr);
    if (arg.type_index == kTVMFFITensor) return TVMFFITensorGetDLTensorPtr(arg.v_obj);
    return nullptr;
  }

  [[noreturn, gnu::cold, gnu::noinline]] void fail(const char* name, const char* expected) const {
    const int32_t type = args_[index_ - 1].type_index;
    const char* const names[] = {"None", "int", "bool", "float"};
    const bool named = type >= 0 && type < static_cast<int32_t>(std::size(names));
    panic("TypeError", name, ": expected ", expected, ", got ", named ? names[type] : "another type");
  }

  const char* function_;
  const TVMFFIAny* args_;
  int32_t count_;
  int32_t index_ = 0;
};

/// What a function returns: nothing (None), one tensor, or a tuple of them.
using Results = tvm::ffi::Array<Tensor>;

inline int call(
    Results (*function)(Arguments&), const char* name, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  Arguments arguments(name, args, count);
  Results results = function(arguments);
  auto& any = *reinterpret_cast<tvm::ffi::Any*>(result);
  if (results.size() == 1) {
    any = results[0];
  } else if (results.size() > 1) {
    any = std::move(results);
  }
  TVM_FFI_SAFE_CALL_END();
}

/// Exports `Results function(Arguments&)` under `name`.
#define SGL_EXPORT(name, function)                                                                                 \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) { \
    return ::host::ffi::call(function, #name, args, n, result);                                                    \
  }

/// A new tensor from the framework's own allocator; in Python it arrives as the framework's tensor.
inline Tensor empty(tvm::ffi::ShapeView shape, DLDataType dtype, DLDevice device) {
  return Tensor::FromEnvAlloc(::TVMFFIEnvTensorAlloc, shape, dtype, device);
}

/// The stream that is current for the caller on `device`.
inline void* current_stream(DLDevice device) {
  return ::TVMFFIEnvGetStream(device.device_type, device.device_id);
}

}  // namespace host::ffi
