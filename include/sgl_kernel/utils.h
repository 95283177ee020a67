/// \file utils.h
/// \brief Host-side errors of the kernel idiom: checks that become Python exceptions of the right type.
///
/// Names and use as in SGLang's `sgl_kernel/utils.h`; the implementation is ours. A failed check of a value raises
/// ValueError, of a type TypeError, where upstream has RuntimeError for both.
#pragma once

#include <tvm/ffi/error.h>

#include <sstream>
#include <string>

namespace host {

template <typename... Args>
[[noreturn, gnu::cold, gnu::noinline]] void panic(const char* kind, const Args&... args) {
  std::ostringstream message;
  (message << ... << args);
  throw tvm::ffi::Error(kind, message.str(), "");
}

/// Raises ValueError with the streamed `args` where `condition` does not hold. Nothing is formatted otherwise.
template <typename... Args>
inline void RuntimeCheck(bool condition, const Args&... args) {
  if (!condition) [[unlikely]]
    panic("ValueError", args...);
}

}  // namespace host
