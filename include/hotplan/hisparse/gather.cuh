/// \file gather.cuh
/// \brief Copies of a layer that an earlier resolution decided, and the invalidation of rewritten rows.
#pragma once

#include <hotplan/hisparse/cache_rows.cuh>
#include <hotplan/hisparse/segment.cuh>

namespace hotplan::hisparse {

inline constexpr uint32_t kGatherThreads = 512;
inline constexpr uint32_t kSegmentRows = 1024;  // launch rows whose lists are copied as one
inline constexpr uint32_t kMaskThreads = 256;
inline constexpr uint32_t kInvalidateThreads = 256;

/// Loads that a lane has under way. Masks have a grid of many small blocks, lists one of few.
inline constexpr int kGatherBatch = 8;
inline constexpr int kMaskedBatch = 4;

/// The lists of a segment's launch rows as one.
struct SegmentLists {
  using Rows = Segment<kGatherThreads, kSegmentRows>;

  const GatherParams& p;
  const Rows& segment;
  uint32_t first_row;
  uint32_t rows;

  __device__ __forceinline__ RowCopy at(uint32_t n) const {
    const uint32_t row = segment.row_of(n, rows);
    return copy_at(p, static_cast<int64_t>(first_row + row) * p.top_k + (n - segment.start[row]));
  }
};

/// Lists and plans. The blocks of a segment share its copies evenly.
__global__ void __launch_bounds__(kGatherThreads, 1)
    gather_lists_kernel(const __grid_constant__ GatherParams p, uint32_t segment_rows, uint32_t width) {
  __shared__ SegmentLists::Rows segment;
  const uint32_t first_row = blockIdx.y * segment_rows;
  const uint32_t rows = min(segment_rows, p.rows - first_row);
  const uint32_t total = segment.open(rows, [&](uint32_t row) { return listed(p, first_row + row); });
  if (total == 0) return;
  constexpr uint32_t kWarps = kGatherThreads / kWarp;
  const CacheRows<SegmentLists> lists{p.caches, {p, segment, first_row, rows}};
  const auto row_bytes = static_cast<uint32_t>(p.caches.row_bytes);
  copy_rows<kGatherBatch>(
      lists, total, row_bytes, width, threadIdx.x / kWarp * gridDim.x + blockIdx.x, gridDim.x * kWarps);
}

/// The columns of a tile whose mask asks for a copy.
struct MaskedColumns {
  const GatherParams& p;
  const uint16_t* columns;
  int64_t base;

  __device__ __forceinline__ RowCopy at(uint32_t n) const {
    return copy_at(p, base + columns[n]);
  }
};

/// gather_plan: a block has a tile of kMaskThreads columns of a launch row.
__global__ void __launch_bounds__(kMaskThreads, 3)
    gather_masked_kernel(const __grid_constant__ GatherParams p, uint32_t tiles, uint32_t width) {
  __shared__ uint16_t columns[kMaskThreads];
  __shared__ uint32_t total;
  const uint32_t row = blockIdx.x / tiles;
  const uint32_t column = blockIdx.x % tiles * kMaskThreads;
  const int64_t base = static_cast<int64_t>(row) * p.top_k + column;
  const bool padding = p.row_states != nullptr && p.row_states[row] < 0;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  bool copies = false;
  if (threadIdx.x < p.top_k - column) {
    const int64_t index = base + threadIdx.x;
    copies = !padding && p.mask[index] != 0;
    if (p.attention) {
      p.attention[index] = padding ? -1 : attention_index(p.caches, p.attention_block_stride, p.hot_rows[index]);
    }
  }
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t copying = __ballot_sync(kFullMask, copies);
  uint32_t first = 0;
  if (lane == 0 && copying != 0) first = atomicAdd(&total, static_cast<uint32_t>(__popc(copying)));
  first = __shfl_sync(kFullMask, first, 0);
  if (copies) columns[first + __popc(copying & ((1u << lane) - 1))] = static_cast<uint16_t>(threadIdx.x);
  __syncthreads();
  if (total == 0) return;
  const CacheRows<MaskedColumns> masked{p.caches, {p, columns, base}};
  const auto row_bytes = static_cast<uint32_t>(p.caches.row_bytes);
  copy_rows<kMaskedBatch>(masked, total, row_bytes, width, threadIdx.x / kWarp, kMaskThreads / kWarp);
}

/// A block has a written token: every slot of its request's hot buffer that holds it is emptied.
__global__ void __launch_bounds__(kInvalidateThreads)
    invalidate_kernel(const __grid_constant__ InvalidateParams p, bool vector) {
  const auto request = static_cast<uint32_t>(p.request_of_token[blockIdx.x]);
  const int64_t written = p.written[blockIdx.x];
  if (request >= p.num_request_states || written < 0 || written > kMaxInt32) return;
  const auto state = static_cast<uint32_t>(p.request_states[request]);
  if (state >= p.state_rows) return;
  int32_t* const dgi = p.dgi + static_cast<int64_t>(state) * p.hot_slots;
  for (uint32_t i = threadIdx.x; i * 4 < p.hot_slots; i += kInvalidateThreads) {
    const Pack<int32_t, 4> held = load_pack<4>(dgi, i, p.hot_slots, vector);
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      if (held.x[j] == written) dgi[i * 4 + j] = -1;
    }
  }
}

}  // namespace hotplan::hisparse
