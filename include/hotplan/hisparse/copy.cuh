/// \file copy.cuh
/// \brief Rows from host memory to the hot cache, read by the SMs through unified addressing.
///
/// A warp has a row at a time, and each lane kBatch loads under way before it stores the first; what the bus needs,
/// 48 GB/s times a round trip of 1.3 us, is 63 KB for the whole GPU. A row of 576 bytes is 36 pieces of 16, so that 28
/// of 32 lanes are idle in its second step. Both ways to fill them were slower, because the reads of a row must be
/// close in time: host memory is far larger than what the GPU's address translation holds. 128 requests at 10 % of
/// misses took 391 us this way, 414 with all lanes counting through the pieces of all rows, and 425 with the ends of
/// several rows in one step (benchmark/NOTES.md).
#pragma once

#include <hotplan/hisparse/block.cuh>

namespace hotplan::hisparse {

/// One load and one store of a copy.
struct Piece {
  const char* from;   // nullptr: there is nothing to read, zeros are written
  char* to;           // nullptr: nothing is written
  bool half = false;  // 8 bytes, where pieces have 16
};

/// The widest pieces of rows whose addresses and sizes have these bits between them.
HOTPLAN_HD uint32_t piece_width(uintptr_t bits) {
  return bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : 1;
}

/// The widths of a piece are 16, 8, 4 and 1 bytes; one loop serves them all, since most of it is finding addresses.
/// Half a piece is read with its other half, so that it needs neither a load nor registers of its own.
template <int kBatch>
__device__ __forceinline__ void load_pieces(uint4 (&data)[kBatch], const Piece (&piece)[kBatch], uint32_t width) {
  bool wanted[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) wanted[b] = piece[b].to != nullptr && piece[b].from != nullptr;
  if (width == 16) [[likely]] {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const auto from = reinterpret_cast<uintptr_t>(piece[b].from) & ~uintptr_t{15};
      load_host(data[b], reinterpret_cast<const char*>(from), wanted[b]);
    }
  } else if (width == 8) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_host(data[b].x, data[b].y, piece[b].from, wanted[b]);
  } else if (width == 4) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_host(data[b].x, piece[b].from, wanted[b]);
  } else {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_host_byte(data[b].x, piece[b].from, wanted[b]);
  }
}

__device__ __forceinline__ void store_piece(const Piece& piece, const uint4& data, uint32_t width) {
  if (piece.to == nullptr) return;
  if (width == 16 && !piece.half) [[likely]] {
    *reinterpret_cast<uint4*>(piece.to) = data;
  } else if (width == 16) {
    const bool second = reinterpret_cast<uintptr_t>(piece.from) % 16 != 0;
    *reinterpret_cast<uint2*>(piece.to) = second ? uint2{data.z, data.w} : uint2{data.x, data.y};
  } else if (width == 8) {
    *reinterpret_cast<uint2*>(piece.to) = {data.x, data.y};
  } else if (width == 4) {
    *reinterpret_cast<uint32_t*>(piece.to) = data.x;
  } else {
    *reinterpret_cast<uint8_t*>(piece.to) = static_cast<uint8_t>(data.x);
  }
}

/// Copies `count` rows in pieces of `width` bytes; the last of a row may be half of one. This warp is one of `workers`.
///
/// rows.row(n) looks one up, which each lane does for one of the next 32 rows of its warp; of_lane() hands it to the
/// others, and rows.piece(row, byte) is what a lane copies.
template <int kBatch, typename Rows>
__device__ __forceinline__ void copy_rows(
    const Rows& rows, uint32_t count, uint32_t row_bytes, uint32_t width, uint32_t worker, uint32_t workers) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t pieces = div_ceil(row_bytes, width);
  for (uint64_t first = worker; first < count; first += uint64_t{kWarp} * workers) {
    const uint64_t own = first + uint64_t{lane} * workers;
    const auto found = rows.row(static_cast<uint32_t>(own < count ? own : first));
    const uint32_t end = min(static_cast<uint32_t>((count - first + workers - 1) / workers), kWarp);
    uint32_t row = 0;  // of the 32
    uint32_t piece = lane;
    auto here = of_lane(found, row);
    while (row < end) {
      Piece copy[kBatch];
      uint4 data[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        copy[b] = rows.piece(here, piece * width);
        if (row >= end || piece >= pieces) copy[b].to = nullptr;
        piece += kWarp;
        if (piece - lane >= pieces) {
          piece = lane;
          here = of_lane(found, ++row);
        }
      }
      load_pieces(data, copy, width);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) store_piece(copy[b], data[b], width);
    }
  }
}

}  // namespace hotplan::hisparse
