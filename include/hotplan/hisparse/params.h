/// \file params.h
/// \brief The contract between check and kernel: everything below was verified before it was filled in.
#pragma once

#include <hotplan/hisparse/plan.h>

namespace hotplan::hisparse {

/// The two pools of one layer, as rows of bytes.
struct Caches {
  const char* host;  // host_rows rows, contiguous
  char* hot;         // blocks of block_size rows
  int64_t host_rows;
  int64_t row_bytes;     // a positive multiple of 16
  int64_t block_stride;  // bytes from hot block to hot block
  FastDiv block_size;
  uint32_t blocks;
  uint32_t hot_rows;  // blocks * block_size, < 2^31 - 1
};

/// An int32 page table. Never read outside its shape, whatever the indices are.
struct BlockTable {
  const int32_t* data;  // nullptr: there is none
  int64_t stride;
  uint32_t rows;
  uint32_t columns;
};

/// What translates top-k entries into ids of the host pool and hot rows.
struct Tables {
  BlockTable hot;       // slot -> page of the hot cache
  BlockTable source;    // position -> page of the host pool; none: entries are ids
  BlockTable resident;  // position -> page that holds the token anyway
  FastDiv source_block_size;
  int32_t resident_null;
  uint32_t id_limit;  // min(host_rows, 2^31): ids are below it
};

/// All index tensors of a resolution. Outputs may be nullptr, except `hot`.
struct ResolveParams {
  Caches caches;
  Tables tables;
  const int32_t* ids;  // [rows, top_k], rows ids_stride apart
  int64_t ids_stride;
  uint32_t rows;
  FastDiv top_k;
  uint32_t hot_slots;             // H, >= top_k
  uint32_t state_rows;            // S
  uint32_t max_union_rows;        // 0: no union rule
  const int32_t* request_ids;     // [>= rows], or nullptr: row r is request r
  const int32_t* request_states;  // [num_request_states], or nullptr: request r has state row r
  uint32_t num_request_states;

  int32_t* dgi;     // [S, H]
  int16_t* lru;     // [S, H]
  uint64_t* stats;  // hits, misses; int64 and uint64 add alike

  int32_t* hot;  // [rows, top_k], as mask, resolved and the swap lists
  int32_t* attention;
  int64_t attention_stride;        // between its rows
  int64_t attention_block_stride;  // between pages, in rows
  int32_t* mask;
  int32_t* resolved;
  int32_t* valid;  // [rows], valid_stride apart
  int64_t valid_stride;
  int32_t* swap_host;
  int32_t* swap_device;
  int32_t* swap_counts;  // [>= rows]
  SwapRow* plan;         // [rows, top_k]
};

/// Copies that were decided before, for one layer. They are named by a mask, by two lists or by a plan.
struct GatherParams {
  Caches caches;
  uint32_t rows;
  uint32_t top_k;
  const int32_t* host_rows;   // [rows, top_k]
  const int32_t* hot_rows;    // [rows, top_k]
  const SwapRow* plan;        // [rows, top_k], instead of the two above
  const int32_t* counts;      // [>= rows], for lists and plans
  const int32_t* mask;        // [rows, top_k], for gather_plan
  const int32_t* row_states;  // [>= rows] or nullptr; negative: padding
  int32_t* attention;         // [rows, top_k] or nullptr
  int64_t attention_block_stride;
};

struct InvalidateParams {
  int32_t* dgi;  // [state_rows, hot_slots]
  uint32_t state_rows;
  uint32_t hot_slots;
  const int32_t* request_states;  // [num_request_states]
  uint32_t num_request_states;
  const int32_t* request_of_token;  // [tokens]
  const int64_t* written;           // [tokens]
  uint32_t tokens;
};

}  // namespace hotplan::hisparse
