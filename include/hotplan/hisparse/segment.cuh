/// \file segment.cuh
/// \brief The lists of many launch rows as one list, so that copies can be dealt out evenly however they are spread.
#pragma once

#include <hotplan/hisparse/block.cuh>

namespace hotplan::hisparse {

/// Of `rows` lists, up to kRows, the n-th element of them all. In shared memory.
template <uint32_t kThreads, uint32_t kRows>
struct Segment {
  static constexpr uint32_t kMostRows = kRows;

  uint32_t start[kRows + 1];
  WarpTotals<uint64_t> totals;

  /// Reads the lengths: count_of(row). Returns their sum. All threads of the block must call it.
  template <typename CountOf>
  __device__ __forceinline__ uint32_t open(uint32_t rows, CountOf&& count_of) {
    constexpr uint32_t kEach = kRows / kThreads;
    uint32_t count[kEach];
    uint32_t own = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t row = threadIdx.x * kEach + i;
      count[i] = row < rows ? count_of(row) : 0;
      own += count[i];
    }
    const auto scanned = block_scan<kThreads>(Pair<uint64_t>::of(own, 0), Pair<uint64_t>{}, totals);
    uint32_t next = scanned.before.first();
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      start[threadIdx.x * kEach + i] = next;
      next += count[i];
    }
    __syncthreads();
    return scanned.total.first();
  }

  /// The last row whose list does not begin behind n.
  __device__ __forceinline__ uint32_t row_of(uint32_t n, uint32_t rows) const {
    return last_not_behind(rows, n, [&](uint32_t row) { return start[row]; });
  }
};

}  // namespace hotplan::hisparse
