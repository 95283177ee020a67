/// \file copy.cuh
/// \brief Rows from host memory to the hot cache, read by the SMs through unified addressing.
///
/// A row of 576 bytes is 36 pieces of 16: one row per warp would leave 28 of 32 lanes idle in its second step. So the
/// lanes of all workers (warps) count through the pieces of all rows as one sequence, and every lane works whatever the
/// row size is. Each has kBatch loads under way before it stores the first; what the bus needs, 48 GB/s times a round
/// trip of 1.3 us, is 63 KB for the whole GPU.
#pragma once

#include <hotplan/hisparse/block.cuh>
#include <hotplan/hisparse/rules.h>

namespace hotplan::hisparse {

/// Copies rows.at(0), ..., rows.at(count - 1), each a RowCopy, in pieces of a Word. This warp is one of `workers`.
template <int kBatch, typename Word, typename Rows>
__device__ __forceinline__ void copy_rows(
    const Caches& caches, const Rows& rows, uint32_t count, uint32_t worker, uint32_t workers) {
  const auto pieces = static_cast<uint32_t>(caches.row_bytes / sizeof(Word));
  const uint32_t first = worker * kWarp + threadIdx.x % kWarp;
  const uint32_t stride = workers * kWarp;
  const uint32_t row_step = stride / pieces;
  const uint32_t piece_step = stride % pieces;
  uint32_t row = first / pieces;
  uint32_t piece = first % pieces;
  while (row < count) {
    Word data[kBatch];
    char* to[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const bool inside = row < count;
      const RowCopy copy = rows.at(inside ? row : count - 1);
      const int64_t offset = static_cast<int64_t>(piece) * sizeof(Word);
      const bool wanted = inside && copy.wanted(caches);
      to[b] = wanted ? caches.hot + hot_offset(caches, static_cast<uint32_t>(copy.hot_row)) + offset : nullptr;
      const char* from = caches.host + copy.host_row * caches.row_bytes + offset;
      load_host(data[b], from, wanted && copy.host_row < caches.host_rows);
      row += row_step;
      piece += piece_step;
      if (piece >= pieces) {
        piece -= pieces;
        ++row;
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (to[b] != nullptr) *reinterpret_cast<Word*>(to[b]) = data[b];
    }
  }
}

}  // namespace hotplan::hisparse
