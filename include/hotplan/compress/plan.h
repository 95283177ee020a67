/// \file plan.h
/// \brief The packed rows of compress plans, byte for byte as SGLang's c4 / c128 compressor kernels read them.
#pragma once

#include <hotplan/platform.h>

namespace hotplan::compress {

/// One closing window: which token closes it, and where the part before this forward's input lies in the state ring.
struct alignas(16) CompressRow {
  uint32_t seq_len;     // position of the closing token + 1
  uint16_t ragged_id;   // row of that token in this forward's input
  uint16_t buffer_len;  // how many rows of the window come from the ring
  int32_t read_page_0;
  int32_t read_page_1;

  HOTPLAN_HD static CompressRow invalid() {
    return {0xFFFFFFFFu, 0, 0, -1, -1};
  }
};

/// One token whose raw state goes to the ring.
struct alignas(8) WriteRow {
  uint32_t ragged_id;
  int32_t write_loc;

  HOTPLAN_HD static WriteRow invalid() {
    return {0xFFFFFFFFu, -1};
  }
};

/// One request of a decode batch.
struct alignas(16) DecodeRow {
  uint32_t seq_len;
  int32_t write_loc;
  int32_t read_page_0;
  int32_t read_page_1;
};

static_assert(sizeof(CompressRow) == 16 && sizeof(WriteRow) == 8 && sizeof(DecodeRow) == 16);

/// ragged_id is a uint16, so a forward has at most 65,536 tokens; batches stay one below that, as upstream.
inline constexpr uint32_t kMaxTokens = 65536;
inline constexpr uint32_t kMaxBatch = 65535;

}  // namespace hotplan::compress
