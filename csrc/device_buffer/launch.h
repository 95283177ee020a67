/// \file launch.h
/// \brief What a backend of this family provides. Linked are either cpu.cpp or launch.cu.
#pragma once

#include <hotplan/device_buffer/params.h>
#include <hotplan/queue.h>

namespace hotplan::device_buffer {

/// Whether kernels can read memory of the host at `host` (pinned, or a system where they can read all of it).
bool device_can_read(const void* host, Queue queue);

/// Device memory that run_swap_in wants for such a call; 0 in all served sizes.
int64_t workspace_bytes(const SwapInParams& params, Queue queue);

Status run_swap_in(const SwapInParams& params, char* workspace, Queue queue);
Status run_planned_copy(const PlannedCopyParams& params, Queue queue);
Status run_transfer(const TransferParams& params, Queue queue);
Status run_translate(const TranslateParams& params, Queue queue);
const char* status_text(Status status);

}  // namespace hotplan::device_buffer
