/// \file params.h
/// \brief The contract between check and kernel: everything below was verified before it was filled in.
#pragma once

#include <hotplan/platform.h>

namespace hotplan::device_buffer {

/// A vector of int32 or int64.
struct Integers {
  const void* data;
  bool wide;  // int64

  HOTPLAN_HD int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

/// A layer's items on the host and on the device.
struct Items {
  const char* host[2];  // [1]: the values of multi-head attention, else nullptr
  char* device[2];
  int64_t host_rows;
  int64_t device_rows;
  uint32_t item_bytes;  // of one pool; paged: value and scale together
  bool paged;           // DeepSeek-V4's pages on both ends, see rules.h
};

/// A swap-in of one layer. Row b is request requests[b]; one step, or up to four that are resolved as one set.
struct SwapInParams {
  Items items;
  uint32_t rows;
  uint32_t steps;
  FastDiv columns;          // outputs of a step
  FastDiv block_tokens;     // tokens of an entry of `top_k`, 1 where entries are tokens
  bool blocks;              // entries are blocks
  const int32_t* top_k;     // [rows, steps, columns / block_tokens]
  int64_t top_k_stride[2];  // of rows and steps
  int32_t* out;             // [rows, steps, columns]
  int64_t out_stride[2];    // of rows and steps
  int32_t padded;           // what the outputs of padded rows become
  Integers requests;        // [rows]
  Integers lengths;         // [rows * steps]
  const int32_t* num_real;  // [1] or nullptr: rows from there on are padding

  uint32_t states;      // requests that have state
  uint32_t slots;       // H
  uint32_t extra;       // slots behind them, outside the LRU
  int32_t* tokens;      // [states, H + extra], buffer_stride apart: the token in every slot
  const int32_t* locs;  // [states, H + extra], likewise: the device row of every slot
  int64_t buffer_stride;
  void* lru;  // [states, H], lru_stride apart: int16 for one step, int32 for several
  int64_t lru_stride;
  const int64_t* host_locs;  // [states, max_tokens]: the host row of every token
  uint32_t max_tokens;

  const int32_t* scratch;  // several steps: [states, scratch_rows], device rows for misses that find no slot
  int64_t scratch_stride;
  uint32_t scratch_rows;
  int32_t* state_misses;  // several steps: [states], misses of the last call

  int64_t* miss_src;  // [rows, >= steps * columns], plan_stride apart, or nullptr: there is no plan
  int32_t* miss_dst;
  int32_t* miss_count;  // [rows]
  int64_t plan_stride;
  bool skip_io;  // all but the bytes
};

/// The copies of a plan that an earlier swap-in has made.
struct PlannedCopyParams {
  Items items;
  uint32_t rows;
  uint32_t capacity;        // copies that a row of the plan can list
  const int64_t* miss_src;  // [rows, capacity], plan_stride apart, as miss_dst
  const int32_t* miss_dst;
  const int32_t* miss_count;  // [rows]
  int64_t plan_stride;
  const int32_t* num_real;  // [1]
  uint32_t blocks;          // thread blocks at most
  bool skip_io;
};

/// Items of all layers between pools in DeepSeek-V4's pages. The pointers are the caller's promise.
struct TransferParams {
  const uint64_t* src_ptrs;  // [layers]
  const uint64_t* dst_ptrs;
  uint32_t layers;
  const int64_t* src_indices;  // [items]
  const int64_t* dst_indices;
  FastDiv items;  // of a layer
};

struct TranslateParams {
  Integers mapping;
  int64_t mapping_size;
  Integers locations;  // `count` of them, `stride` apart
  int64_t stride;
  int64_t count;
  void* out;      // [count]
  bool wide_out;  // int64
};

}  // namespace hotplan::device_buffer
