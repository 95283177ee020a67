/// \file queue.h
/// \brief What all families' launch.h say in: where to run, and how it went.
#pragma once

struct CUstream_st;  // cudaStream_t points to one; entry.cpp needs no CUDA header for it

namespace hotplan {

/// A status of the backend: 0, or a cudaError_t. A plain int, for the same reason.
using Status = int;

/// Where to run. The CPU backends ignore both.
struct Queue {
  int device;
  CUstream_st* stream;
};

}  // namespace hotplan
