/// \file launch.h
/// \brief What a backend of this family provides. Linked are either cpu.cpp or launch.cu.
#pragma once

#include <hotplan/compress/params.h>

namespace hotplan::compress {

/// A status of the backend: 0, or a cudaError_t. A plain int, so that entry.cpp needs no CUDA header.
using Status = int;

/// Where to run. The CPU backend ignores both.
struct Queue {
  int device;
  void* stream;
};

Status run_prefill(const PrefillParams& params, Queue queue);
Status run_decode(const DecodeParams& params, Queue queue);
Status run_verify(const VerifyParams& params, Queue queue);
const char* status_text(Status status);

}  // namespace hotplan::compress
