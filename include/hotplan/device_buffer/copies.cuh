/// \file copies.cuh
/// \brief Copies that are decided already: a recorded plan, all layers of a list of items; and the translation of
/// slots.
#pragma once

#include <hotplan/device_buffer/items.cuh>
#include <hotplan/hisparse/segment.cuh>

namespace hotplan::device_buffer {

/// With eight loads under way in each lane, 80 warps of four blocks have 320 items at once. 8 x 36 items take 9.5 us,
/// and 11.9 with 512 threads, 8 x 200 items 25.7 and 30.7; with 1,024 threads and four loads 11.2 and 26.2.
inline constexpr uint32_t kPlannedThreads = 640;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kPlannedLoads = 6;  // its code takes more registers there
#else
inline constexpr int kPlannedLoads = 8;
#endif
inline constexpr uint32_t kTransferThreads = 256;
inline constexpr uint32_t kTranslateThreads = 128;

/// The plans of a segment's rows as one.
struct PlannedCopies {
  using Rows = hisparse::Segment<kPlannedThreads, 2 * kPlannedThreads>;

  const PlannedCopyParams& p;
  const Rows& segment;
  uint32_t first_row;
  uint32_t rows;

  __device__ __forceinline__ ItemCopy at(uint32_t n) const {
    const uint32_t row = segment.row_of(n, rows);
    const int64_t at = (first_row + row) * p.plan_stride + (n - segment.start[row]);
    return {p.miss_src[at], p.miss_dst[at]};
  }
};

/// A grid of few blocks, which run beside a layer's compute on a side stream. With a look-up for every piece instead of
/// every item 8 x 200 items of 576 bytes took 33.9 us instead of 29.3.
__global__ void __launch_bounds__(kPlannedThreads, 1)
    copy_planned_kernel(const __grid_constant__ PlannedCopyParams p, uint32_t segment_rows, uint32_t piece_bytes) {
  __shared__ PlannedCopies::Rows segment;
  constexpr uint32_t kWarps = kPlannedThreads / kWarp;
#pragma unroll 1
  for (uint32_t first_row = 0; first_row < p.rows; first_row += segment_rows) {
    const uint32_t rows = min(segment_rows, p.rows - first_row);
    __syncthreads();  // the last segment is read
    const uint32_t total = segment.open(rows, [&](uint32_t row) { return listed(p, first_row + row); });
    if (total == 0) continue;
    const ItemRows<PlannedCopies> copies{p.items, {p, segment, first_row, rows}};
    hisparse::copy_rows<kPlannedLoads>(
        copies, total, copied_bytes(p.items), piece_bytes, threadIdx.x / kWarp * gridDim.x + blockIdx.x,
        gridDim.x * kWarps);
  }
}

/// The items of all layers, one layer after the other.
struct LayeredItems {
  const TransferParams& p;

  __device__ __forceinline__ ItemRow row(uint32_t n) const {
    const uint32_t layer = p.items.div(n);
    const uint32_t item = n - layer * p.items.divisor;
    const int64_t src = p.src_indices[item];
    const int64_t dst = p.dst_indices[item];
    if (src < 0 || dst < 0) return {nullptr, nullptr, 0};
    return ItemRow::paged(
        reinterpret_cast<const char*>(p.src_ptrs[layer]), src, reinterpret_cast<char*>(p.dst_ptrs[layer]), dst);
  }

  __device__ __forceinline__ Piece piece(const ItemRow& row, uint32_t byte) const {
    return row.to == nullptr ? Piece{nullptr, nullptr} : row.paged_piece(byte);
  }
};

/// All blocks are in the same layer or two at a time: a pool in host memory is larger than what the GPU's address
/// translation holds. 256 items of 43 layers took 268 us with a row of blocks for every layer, and take 146 now
/// (benchmark/NOTES.md).
__global__ void __launch_bounds__(kTransferThreads) transfer_kernel(const __grid_constant__ TransferParams p) {
  constexpr uint32_t kWarps = kTransferThreads / kWarp;
  bool narrow = false;
  for (uint32_t layer = threadIdx.x; layer < p.layers; layer += kTransferThreads) {
    narrow |= (p.src_ptrs[layer] | p.dst_ptrs[layer]) % 16 != 0;
  }
  const uint32_t width = __syncthreads_or(narrow) ? kScaleBytes : 16;
  hisparse::copy_rows<4>(
      LayeredItems{p}, p.layers * p.items.divisor, kPagedItemBytes, width, threadIdx.x / kWarp * gridDim.x + blockIdx.x,
      gridDim.x * kWarps);
}

__global__ void __launch_bounds__(kTranslateThreads) translate_kernel(const __grid_constant__ TranslateParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kTranslateThreads + threadIdx.x;
  if (i >= p.count) return;
  const int64_t row = translated(p, i);
  if (p.wide_out) {
    static_cast<int64_t*>(p.out)[i] = row;
  } else {
    static_cast<int32_t*>(p.out)[i] = static_cast<int32_t>(row);
  }
}

}  // namespace hotplan::device_buffer
