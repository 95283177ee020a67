/// \file copy.cuh
/// \brief Rows from host memory to the hot cache, read by the SMs through unified addressing.
///
/// A row of 576 bytes is 36 pieces of 16: one row per warp would leave 28 of 32 lanes idle in its second step. So the
/// lanes of all workers (warps) count through the pieces of all rows as one sequence, and every lane works whatever the
/// row size is. Each has kBatch loads under way before it stores the first; what the bus needs, 48 GB/s times a round
/// trip of 1.3 us, is 63 KB for the whole GPU.
#pragma once

#include <hotplan/hisparse/block.cuh>

namespace hotplan::hisparse {

/// One load and one store of a copy.
struct Piece {
  const char* from;   // nullptr: there is nothing to read, zeros are written
  char* to;           // nullptr: nothing is written
  bool half = false;  // 8 bytes, where pieces have 16
};

/// The widths of a piece are 16, 8, 4 and 1 bytes; one loop serves them all, since most of it is finding addresses.
/// Halves go into registers of their own: in those of a whole piece their load would wait for the one before.
template <int kBatch>
__device__ __forceinline__ void load_pieces(
    uint4 (&data)[kBatch], uint2 (&half)[kBatch], const Piece (&piece)[kBatch], const bool (&wanted)[kBatch],
    uint32_t width, bool halves) {
  if (width == 16) [[likely]] {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_host(data[b], piece[b].from, wanted[b] && !piece[b].half);
    if (halves) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) load_host(half[b].x, half[b].y, piece[b].from, wanted[b] && piece[b].half);
    }
  } else if (width == 8) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_host(half[b].x, half[b].y, piece[b].from, wanted[b]);
  } else if (width == 4) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_host(data[b].x, piece[b].from, wanted[b]);
  } else {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_host_byte(data[b].x, piece[b].from, wanted[b]);
  }
}

__device__ __forceinline__ void store_piece(const Piece& piece, const uint4& data, const uint2& half, uint32_t width) {
  if (width == 16 && !piece.half) [[likely]] {
    *reinterpret_cast<uint4*>(piece.to) = data;
  } else if (width >= 8) {
    *reinterpret_cast<uint2*>(piece.to) = half;
  } else if (width == 4) {
    *reinterpret_cast<uint32_t*>(piece.to) = data.x;
  } else {
    *reinterpret_cast<uint8_t*>(piece.to) = static_cast<uint8_t>(data.x);
  }
}

/// Copies the pieces of `count` rows, rows.piece(row, byte) each, of `width` bytes; the last of a row may be half of
/// one. This warp is one of `workers`.
template <int kBatch, typename Rows>
__device__ __forceinline__ void copy_rows(
    const Rows& rows, uint32_t count, uint32_t row_bytes, uint32_t width, uint32_t worker, uint32_t workers) {
  const uint32_t pieces = div_ceil(row_bytes, width);
  const uint32_t first = worker * kWarp + threadIdx.x % kWarp;
  const uint32_t stride = workers * kWarp;
  const uint32_t row_step = stride / pieces;
  const uint32_t piece_step = stride % pieces;
  uint32_t row = first / pieces;
  uint32_t piece = first % pieces;
  while (row < count) {
    uint4 data[kBatch];
    uint2 half[kBatch];
    Piece copy[kBatch];
    bool wanted[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const bool inside = row < count;
      copy[b] = rows.piece(inside ? row : count - 1, piece * width);
      if (!inside) copy[b].to = nullptr;
      wanted[b] = copy[b].to != nullptr && copy[b].from != nullptr;
      row += row_step;
      piece += piece_step;
      if (piece >= pieces) {
        piece -= pieces;
        ++row;
      }
    }
    load_pieces(data, half, copy, wanted, width, row_bytes % width != 0);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (copy[b].to != nullptr) store_piece(copy[b], data[b], half[b], width);
    }
  }
}

}  // namespace hotplan::hisparse
