/// \file decode.cuh
/// \brief Decode and verify plans: one thread per request and plan.
#pragma once

#include <hotplan/compress/lengths.cuh>

namespace hotplan::compress {

/// blockIdx.y is the output. `begin` is the first request of this launch; lengths count from there.
template <typename Source>
__global__ void __launch_bounds__(256) decode_kernel(
    const __grid_constant__ DecodeParams p, const __grid_constant__ Source lengths, uint32_t begin, uint32_t count) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const DecodeOutput out = in_registers(p.outputs[blockIdx.y]);
  out.rows[begin + i] = decode_row(out.spec, p.tables, p.rid[begin + i], lengths[i].seq);
}

__global__ void __launch_bounds__(256) verify_kernel(const __grid_constant__ VerifyParams p) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.batch) return;
  VerifyRows rows{CompressRow::invalid(), CompressRow::invalid()};
  if (i < active_requests(p)) rows = verify_rows(p.plan, p.rid[i], p.prefix[i], p.num_draft_tokens, i);
  p.compress[i] = rows.compress;
  p.write[i] = rows.write;
}

}  // namespace hotplan::compress
