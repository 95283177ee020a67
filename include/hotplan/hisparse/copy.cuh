/// \file copy.cuh
/// \brief Rows from host memory to the hot cache, read by the SMs through unified addressing.
///
/// A warp has a row at a time, and each lane kBatch loads under way before it stores the first; what the bus needs,
/// 48 GB/s times a round trip of 1.3 us, is 63 KB for the whole GPU. A row of 576 bytes is 36 pieces of 16: 32 for a
/// step of the warp, and 4, of which 8 rows' fill another step. When all lanes counted through the pieces of all rows,
/// warps read across the ends of rows, in more requests to the bus (656 bytes: 42 to 44 GB/s instead of 45), and every
/// piece looked up its row: the copies of a plan of 8 x 200 rows by four blocks took 33.9 us.
#pragma once

#include <hotplan/hisparse/block.cuh>

namespace hotplan::hisparse {

/// One load and one store of a copy.
struct Piece {
  const char* from;  // nullptr: there is nothing to read, zeros are written
  char* to;          // nullptr: nothing is written
};

/// The widest pieces of rows whose addresses and sizes have these bits between them.
HOTPLAN_HD uint32_t piece_width(uintptr_t bits) {
  return bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : 1;
}

/// The widths of a piece are 16, 8, 4 and 1 bytes; one loop serves them all, since most of it is finding addresses.
template <int kBatch>
__device__ __forceinline__ void load_pieces(uint4 (&data)[kBatch], const Piece (&piece)[kBatch], uint32_t width) {
  bool wanted[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) wanted[b] = piece[b].to != nullptr && piece[b].from != nullptr;
  if (width == 16) [[likely]] {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_host(data[b], piece[b].from, wanted[b]);
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
  if (width == 16) [[likely]] {
    *reinterpret_cast<uint4*>(piece.to) = data;
  } else if (width == 8) {
    *reinterpret_cast<uint2*>(piece.to) = {data.x, data.y};
  } else if (width == 4) {
    *reinterpret_cast<uint32_t*>(piece.to) = data.x;
  } else {
    *reinterpret_cast<uint8_t*>(piece.to) = static_cast<uint8_t>(data.x);
  }
}

/// The steps in which a warp copies up to 32 rows: first those that all lanes fill with pieces of one row, then the
/// rest of each row, of several rows at once.
struct WarpSteps {
  uint32_t lane = threadIdx.x % kWarp;
  uint32_t rows = 0;
  uint32_t full;        // steps of a row that all lanes fill
  uint32_t rest;        // pieces that are left
  uint32_t rests;       // rows whose rest fits a step
  uint32_t rest_row;    // of these, this lane's
  uint32_t rest_piece;  // and what it copies of it
  uint32_t row = 0;
  uint32_t step = 0;
  bool in_rests = false;

  __device__ __forceinline__ explicit WarpSteps(uint32_t pieces) : full(pieces / kWarp), rest(pieces % kWarp) {
    rests = rest == 0 ? 0 : kWarp / rest;
    rest_row = rest == 0 ? 0 : lane / rest;
    rest_piece = full * kWarp + (lane - rest_row * rest);
  }

  __device__ __forceinline__ void begin(uint32_t count) {
    rows = full + rest == 0 ? 0 : count;
    row = 0;
    step = 0;
    in_rests = full == 0;
  }

  __device__ __forceinline__ bool done() const {
    return row >= rows && (in_rests || rest == 0);
  }

  /// What this lane copies in the next step: a piece of row `from` of the 32; false: nothing.
  __device__ __forceinline__ bool next(uint32_t& from, uint32_t& piece) {
    if (!in_rests) {
      from = row;
      piece = step * kWarp + lane;
      const bool inside = row < rows;
      if (++step == full) {
        step = 0;
        if (++row >= rows && rest != 0) {
          row = 0;
          in_rests = true;
        }
      }
      return inside;
    }
    from = row + rest_row;
    piece = rest_piece;
    row += rests;
    return rest_row < rests && from < rows;
  }
};

/// Copies `count` rows in pieces of `width` bytes. Half a piece may be left of a row (8 bytes; the scale of an item of
/// DeepSeek-V4's pages), which a lane copies by itself. This warp is one of `workers`.
///
/// rows.row(n) looks one up, which each lane does for one of the next 32 rows of its warp; of_lane() hands it to the
/// others, and rows.piece(row, byte) is what a lane copies.
template <int kBatch, typename Rows>
__device__ __forceinline__ void copy_rows(
    const Rows& rows, uint32_t count, uint32_t row_bytes, uint32_t width, uint32_t worker, uint32_t workers) {
  const uint32_t pieces = row_bytes / width;
  const bool halves = row_bytes % width != 0;
  WarpSteps steps(pieces);
  for (uint64_t first = worker; first < count; first += uint64_t{kWarp} * workers) {
    const uint64_t own = first + uint64_t{steps.lane} * workers;
    const auto found = rows.row(static_cast<uint32_t>(own < count ? own : first));
    Piece half[1]{};
    uint4 half_data[1];
    if (halves) {
      if (own < count) half[0] = rows.piece(found, pieces * width);
      load_pieces(half_data, half, 8);
    }
    steps.begin(min(static_cast<uint32_t>((count - first + workers - 1) / workers), kWarp));
    while (!steps.done()) {
      Piece copy[kBatch];
      uint4 data[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        uint32_t row;
        uint32_t piece;
        const bool copies = steps.next(row, piece);
        copy[b] = rows.piece(of_lane(found, row), piece * width);
        if (!copies) copy[b].to = nullptr;
      }
      load_pieces(data, copy, width);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) store_piece(copy[b], data[b], width);
    }
    if (halves) store_piece(half[0], half_data[0], 8);
  }
}

}  // namespace hotplan::hisparse
