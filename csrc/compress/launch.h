/// \file launch.h
/// \brief What a backend of this family provides. Linked are either cpu.cpp or launch.cu.
#pragma once

#include <hotplan/compress/params.h>
#include <hotplan/queue.h>

namespace hotplan::compress {

Status run_prefill(const PrefillParams& params, Queue queue);
Status run_decode(const DecodeParams& params, Queue queue);
Status run_verify(const VerifyParams& params, Queue queue);
const char* status_text(Status status);

}  // namespace hotplan::compress
