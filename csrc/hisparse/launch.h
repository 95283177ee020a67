/// \file launch.h
/// \brief What a backend of this family provides. Linked are either cpu.cpp or launch.cu.
#pragma once

#include <hotplan/hisparse/params.h>
#include <hotplan/queue.h>

namespace hotplan::hisparse {

/// Whether kernels can read host memory at `host` (pinned, or a system where they can read all of it).
bool device_can_read(const void* host, Queue queue);

/// Device memory that run_resolve or run_swap_in wants for such a call: for sets past shared memory, and for lists
/// where resolution and copies are two launches. 0 in all served sizes on GPUs with clusters.
int64_t workspace_bytes(const ResolveParams& params, bool copy, Queue queue);

Status run_resolve(const ResolveParams& params, char* workspace, Queue queue);
Status run_swap_in(const ResolveParams& params, char* workspace, Queue queue);  // resolve, and copy one layer
Status run_gather(const GatherParams& params, Queue queue);
Status run_invalidate(const InvalidateParams& params, Queue queue);
const char* status_text(Status status);

/// A union that breaks the rule: too many rows, or more distinct ids than slots.
struct UnionFault {
  bool too_long;
  int32_t request;
  uint32_t first_row;
  uint32_t rows;
  uint32_t distinct;
};

/// CPU backend only: the first fault of a launch, if there is one.
bool find_union_fault(const ResolveParams& params, UnionFault& fault);

}  // namespace hotplan::hisparse
