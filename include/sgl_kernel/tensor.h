/// \file tensor.h
/// \brief Tensor checks at the entry of an operator: named sizes, dtypes and devices that several tensors share.
///
/// \code
///   auto B = SymbolicSize{"batch"};
///   auto device = SymbolicDevice{kDLCUDA};
///   TensorMatcher({B}).with_dtype<int64_t>().with_device(device).verify(seq_lens, "seq_lens");
///   TensorMatcher({B, 16}).with_dtype<uint8_t>().with_device(device).verify(out, "out");
/// \endcode
/// The first tensor binds what is not bound yet; a later one that differs is an error that names the argument, what was
/// expected and what came. A tensor is contiguous unless `with_strides` says otherwise.
#pragma once

#include <sgl_kernel/utils.h>

#include <tvm/ffi/container/tensor.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

namespace host {

inline bool same_dtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

inline std::string dtype_name(DLDataType t) {
  const char* const names[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  if (t.code == kDLBool) return "bool";
  return (t.code < std::size(names) ? names[t.code] : "type" + std::to_string(t.code) + "_") + std::to_string(t.bits);
}

inline std::string device_name(DLDevice d) {
  switch (d.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      return "cpu";
    case kDLCUDA:
      return d.device_id < 0 ? "cuda" : "cuda:" + std::to_string(d.device_id);
    default:
      return "device type " + std::to_string(d.device_type);
  }
}

template <typename T>
constexpr DLDataType dtype_of() {
  static_assert(std::is_integral_v<T>, "the operators' index tensors are integers");
  return {std::is_signed_v<T> ? uint8_t{kDLInt} : uint8_t{kDLUInt}, sizeof(T) * 8, 1};
}

/// A size that is bound by the first tensor that has it.
class SymbolicSize {
 public:
  explicit SymbolicSize(const char* name) : name_(name) {}
  SymbolicSize(const SymbolicSize&) = delete;

  bool match(int64_t value) {
    if (value_ < 0) value_ = value;
    return value_ == value;
  }
  int64_t unwrap() const {
    return value_;
  }
  std::string text() const {
    return value_ < 0 ? name_ : std::string(name_) + "=" + std::to_string(value_);
  }

 private:
  const char* name_;
  int64_t value_ = -1;
};

/// A dtype that is bound by the first tensor that has it, among those named at construction.
class SymbolicDType {
 public:
  template <typename... Ts>
  static SymbolicDType of() {
    static_assert(sizeof...(Ts) >= 1 && sizeof...(Ts) <= kMaxOptions);
    SymbolicDType symbol;
    ((symbol.options_[symbol.num_options_++] = dtype_of<Ts>()), ...);
    return symbol;
  }

  bool match(DLDataType t) {
    if (bound_) return same_dtype(t, value_);
    for (int i = 0; i < num_options_ && !bound_; ++i) bound_ = same_dtype(t, options_[i]);
    if (bound_) value_ = t;
    return bound_;
  }
  template <typename T>
  bool is() const {
    return bound_ && same_dtype(value_, dtype_of<T>());
  }
  std::string text() const {
    if (bound_) return dtype_name(value_);
    std::string text;
    for (int i = 0; i < num_options_; ++i) text += (i ? " or " : "") + dtype_name(options_[i]);
    return text;
  }

 private:
  static constexpr int kMaxOptions = 2;
  SymbolicDType() = default;

  std::array<DLDataType, kMaxOptions> options_{};
  int num_options_ = 0;
  bool bound_ = false;
  DLDataType value_{};
};

/// A device that is bound by the first tensor that has it, among the kinds named at construction.
class SymbolicDevice {
 public:
  SymbolicDevice(std::initializer_list<DLDeviceType> kinds) {
    for (const auto kind : kinds) kinds_[num_kinds_++] = kind;
  }
  SymbolicDevice(const SymbolicDevice&) = delete;

  bool match(DLDevice d) {
    if (d.device_type == kDLCUDAHost) d = {kDLCPU, 0};  // pinned memory is host memory
    if (bound_) return d.device_type == value_.device_type && (is_cpu() || d.device_id == value_.device_id);
    for (int i = 0; i < num_kinds_ && !bound_; ++i) bound_ = kinds_[i] == d.device_type;
    if (bound_) value_ = d;
    return bound_;
  }
  DLDevice unwrap() const {
    return value_;
  }
  bool is_cpu() const {
    return value_.device_type == kDLCPU;
  }
  std::string text() const {
    if (bound_) return device_name(value_);
    std::string names;
    for (int i = 0; i < num_kinds_; ++i) names += (i ? " or " : "") + device_name({kinds_[i], -1});
    return names;
  }

 private:
  std::array<DLDeviceType, 3> kinds_{};
  int num_kinds_ = 0;
  bool bound_ = false;
  DLDevice value_{kDLCPU, 0};
};

/// One entry of an expected shape or stride list: a number, a SymbolicSize, or any size at all.
class SizeRef {
 public:
  SizeRef() = default;
  SizeRef(int64_t literal) : literal_(literal) {}
  SizeRef(SymbolicSize& symbol) : symbol_(&symbol) {}

  bool match(int64_t value) const {
    if (symbol_) return symbol_->match(value);
    return literal_ < 0 || literal_ == value;
  }
  std::string text() const {
    return symbol_ ? symbol_->text() : literal_ < 0 ? "*" : std::to_string(literal_);
  }

 private:
  SymbolicSize* symbol_ = nullptr;
  int64_t literal_ = -1;
};

inline constexpr int64_t kAnySize = -1;

inline std::string shape_text(tvm::ffi::ShapeView sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

inline void verify_device(const tvm::ffi::TensorView& t, const char* name, SymbolicDevice& device) {
  if (!device.match(t.device())) [[unlikely]]
    panic("ValueError", name, ": expected device ", device.text(), ", got ", device_name(t.device()));
}

inline void verify_contiguous(const tvm::ffi::TensorView& t, const char* name) {
  // An empty tensor is contiguous whatever its strides; tvm-ffi 0.1.11 does not know.
  if (t.numel() != 0 && !t.IsContiguous()) [[unlikely]]
    panic("ValueError", name, ": expected a contiguous tensor, got strides ", shape_text(t.strides()));
}

/// The first element, aligned to `bytes`.
inline char* verified_data(const tvm::ffi::TensorView& t, const char* name, int64_t bytes = 1) {
  auto* const data = static_cast<char*>(t.data_ptr()) + t.byte_offset();
  if (bytes > 1 && reinterpret_cast<uintptr_t>(data) % bytes != 0) [[unlikely]]
    panic("ValueError", name, ": expected data aligned to ", bytes, " bytes, got an odd offset");
  return data;
}

class TensorMatcher {
 public:
  explicit TensorMatcher(std::initializer_list<SizeRef> shape) : ndim_(static_cast<int>(shape.size())) {
    int i = 0;
    for (const auto& size : shape) shape_[i++] = size;
  }

  TensorMatcher&& with_strides(std::initializer_list<SizeRef> strides) && {
    int i = 0;
    for (const auto& stride : strides) strides_[i++] = stride;
    has_strides_ = true;
    return std::move(*this);
  }

  template <typename T>
  TensorMatcher&& with_dtype() && {
    literal_dtype_ = dtype_of<T>();
    has_dtype_ = true;
    return std::move(*this);
  }

  TensorMatcher&& with_dtype(SymbolicDType& dtype) && {
    dtype_ = &dtype;
    return std::move(*this);
  }

  TensorMatcher&& with_device(SymbolicDevice& device) && {
    device_ = &device;
    return std::move(*this);
  }

  /// The data pointer is a multiple of `bytes`.
  TensorMatcher&& with_alignment(int64_t bytes) && {
    alignment_ = bytes;
    return std::move(*this);
  }

  /// Checks `t`, whose name in the Python function is `name`, and returns its data pointer.
  void* verify(const tvm::ffi::TensorView& t, const char* name) const {
    if (dtype_ && !dtype_->match(t.dtype())) [[unlikely]]
      panic("TypeError", name, ": expected dtype ", dtype_->text(), ", got ", dtype_name(t.dtype()));
    if (has_dtype_ && !same_dtype(t.dtype(), literal_dtype_)) [[unlikely]]
      panic("TypeError", name, ": expected dtype ", dtype_name(literal_dtype_), ", got ", dtype_name(t.dtype()));
    RuntimeCheck(t.ndim() == ndim_, name, ": expected shape ", list_text(shape_), ", got ", shape_text(t.shape()));
    for (int i = 0; i < ndim_; ++i) {
      if (!shape_[i].match(t.size(i))) [[unlikely]]
        panic("ValueError", name, ": expected shape ", list_text(shape_), ", got ", shape_text(t.shape()));
    }
    if (device_) verify_device(t, name, *device_);
    verify_strides(t, name);
    return verified_data(t, name, alignment_);
  }

 private:
  using Sizes = std::array<SizeRef, 4>;

  void verify_strides(const tvm::ffi::TensorView& t, const char* name) const {
    if (!has_strides_) return verify_contiguous(t, name);
    for (int i = 0; i < ndim_; ++i) {
      if (t.size(i) > 1 && !strides_[i].match(t.stride(i))) [[unlikely]]
        panic("ValueError", name, ": expected strides ", list_text(strides_), ", got ", shape_text(t.strides()));
    }
  }

  std::string list_text(const Sizes& sizes) const {
    std::string text = "[";
    for (int i = 0; i < ndim_; ++i) text += (i ? ", " : "") + sizes[i].text();
    return text + "]";
  }

  int ndim_;
  Sizes shape_;
  Sizes strides_;
  bool has_strides_ = false;
  SymbolicDType* dtype_ = nullptr;
  DLDataType literal_dtype_{};
  bool has_dtype_ = false;
  SymbolicDevice* device_ = nullptr;
  int64_t alignment_ = 1;
};

}  // namespace host
