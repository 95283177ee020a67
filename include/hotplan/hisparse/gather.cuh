/// \file gather.cuh
/// \brief Copies of a layer that an earlier resolution decided, and the invalidation of rewritten rows.
#pragma once

#include <hotplan/hisparse/copy.cuh>

namespace hotplan::hisparse {

inline constexpr uint32_t kGatherThreads = 512;
inline constexpr uint32_t kSegmentRows = 1024;  // launch rows whose lists are copied as one
inline constexpr uint32_t kMaskThreads = 256;
inline constexpr uint32_t kInvalidateThreads = 256;

/// Loads that a lane has under way.
template <typename Word>
inline constexpr int kGatherBatch = sizeof(Word) == 16 ? 8 : 4;

/// Elements [0, start[rows]) of the lists of a segment's launch rows, as one list.
struct SegmentLists {
  const GatherParams& p;
  const uint32_t* start;  // [rows + 1]
  uint32_t first_row;
  uint32_t rows;

  __device__ __forceinline__ RowCopy at(uint32_t n) const {
    uint32_t low = 0;  // the last row whose list does not begin behind n
    for (uint32_t size = rows; size > 1;) {
      const uint32_t half = size / 2;
      low += start[low + half] <= n ? half : 0;
      size -= half;
    }
    return copy_at(p, static_cast<int64_t>(first_row + low) * p.top_k + (n - start[low]));
  }
};

/// Lists and plans. The blocks of a segment share its copies evenly, however they are spread over the launch rows.
template <typename Word>
__global__ void __launch_bounds__(kGatherThreads, 1)
    gather_lists_kernel(const __grid_constant__ GatherParams p, uint32_t segment_rows) {
  __shared__ uint32_t start[kSegmentRows + 1];
  __shared__ WarpTotals<uint64_t> totals;
  constexpr uint32_t kEach = kSegmentRows / kGatherThreads;
  const uint32_t first_row = blockIdx.y * segment_rows;
  const uint32_t rows = min(segment_rows, p.rows - first_row);
  uint32_t count[kEach];
  uint32_t own = 0;
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t row = threadIdx.x * kEach + i;
    count[i] = row < rows ? listed(p, first_row + row) : 0;
    own += count[i];
  }
  const auto scanned = block_scan<kGatherThreads>(Pair<uint64_t>::of(own, 0), Pair<uint64_t>{}, totals);
  uint32_t next = scanned.before.first();
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    start[threadIdx.x * kEach + i] = next;
    next += count[i];
  }
  __syncthreads();
  const uint32_t total = scanned.total.first();
  if (total == 0) return;
  constexpr uint32_t kWarps = kGatherThreads / kWarp;
  const SegmentLists lists{p, start, first_row, rows};
  copy_rows<kGatherBatch<Word>, Word>(
      p.caches, lists, total, blockIdx.x * kWarps + threadIdx.x / kWarp, gridDim.x * kWarps);
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
template <typename Word>
__global__ void __launch_bounds__(kMaskThreads, 3)
    gather_masked_kernel(const __grid_constant__ GatherParams p, uint32_t tiles) {
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
  copy_rows<kGatherBatch<Word>, Word>(
      p.caches, MaskedColumns{p, columns, base}, total, threadIdx.x / kWarp, kMaskThreads / kWarp);
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
