/// \file load.cuh
/// \brief The swap-in kernel: SGLang's addressing for the resolution, and the rows that need none.
///
/// A set is the columns of one launch row, of one step or of several. Ids are token positions; what a slot holds and
/// where it lies are rows of the request's tables.
#pragma once

#include <hotplan/device_buffer/items.cuh>
#include <hotplan/hisparse/resolver.cuh>

namespace hotplan::device_buffer {

using hisparse::kColumnPack;
using hisparse::load_pack;
using hisparse::Pack;
using hisparse::SetLaunch;
using hisparse::SetShape;
using hisparse::Span;

/// Loads of a copy that a lane has under way: what fits its 64 registers, which depends on the architecture.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)
inline constexpr int kLoadBatch = 4;
#else
inline constexpr int kLoadBatch = 2;
#endif

/// What a launch adds to the params.
struct LoadLaunch {
  uint32_t first_row;  // of this launch
  uint32_t piece_bytes;
  SetLaunch set;
};

template <bool kSteps>
struct Request {
  using LruSlot = std::conditional_t<kSteps, int32_t, int16_t>;
  using Source = int64_t;
  static constexpr bool kSpare = kSteps;

  const SwapInParams& p;
  const LoadLaunch& launch;
  uint32_t row;
  int32_t state;
  int64_t length;        // of the one step
  int64_t* lengths;      // of several
  int32_t* row_of;       // [H + extra], the device row of every slot
  int32_t* last_tokens;  // [extra], what the extra slots hold; several steps

  __device__ __forceinline__
  Request(const SwapInParams& params, const LoadLaunch& how, char* own, uint32_t launch_row, int32_t state_row)
      : p(params),
        launch(how),
        row(launch_row),
        state(state_row),
        length(kSteps ? 0 : params.lengths.at(launch_row)),
        lengths(reinterpret_cast<int64_t*>(own)),
        row_of(reinterpret_cast<int32_t*>(own + (kSteps ? params.steps * sizeof(int64_t) : 0))),
        last_tokens(row_of + params.slots + asked_extra(params)) {}

  /// Slots behind the LRU that can be asked for.
  HOTPLAN_HD static uint32_t asked_extra(const SwapInParams& p) {
    return kSteps ? p.extra : 1;
  }
  HOTPLAN_HD static SetShape shape(const SwapInParams& p) {
    const uint32_t rows = p.slots + asked_extra(p) * (kSteps ? 2 : 1);
    const uint32_t own = rows * 4 + (kSteps ? p.steps * 8 : 0);
    return {p.steps * p.columns.divisor, p.slots, kSteps ? p.scratch_rows : 0, sizeof(Source), own};
  }

  __device__ __forceinline__ uint32_t columns() const {
    return kSteps ? p.steps * p.columns.divisor : p.columns.divisor;
  }
  __device__ __forceinline__ uint32_t slots() const {
    return p.slots;
  }
  __device__ __forceinline__ LruSlot* lru() const {
    return static_cast<LruSlot*>(p.lru) + state * p.lru_stride;
  }
  __device__ __forceinline__ int32_t* held() const {
    return p.tokens + state * p.buffer_stride;
  }
  __device__ __forceinline__ const int32_t* locs() const {
    return p.locs + state * p.buffer_stride;
  }

  template <bool kShared>
  __device__ __forceinline__ void load_rows() const {
    const uint32_t rows = p.slots + asked_extra(p);
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < rows; i += hisparse::kResolveThreads) load_word<kShared>(row_of + i, locs() + i);
    if constexpr (kSteps) {
      if (threadIdx.x < p.steps) {
        lengths[threadIdx.x] = p.lengths.at(static_cast<int64_t>(row) * p.steps + threadIdx.x);
      }
      for (uint32_t i = threadIdx.x; i < p.extra; i += hisparse::kResolveThreads) {
        load_word<kShared>(last_tokens + i, held() + p.slots + i);
      }
    }
  }
  __device__ __forceinline__ int32_t row_of_slot(uint32_t slot) const {
    return device_row(p.items, row_of[slot]);
  }
  __device__ __forceinline__ uint32_t spare() const {
    return p.scratch_rows;
  }
  __device__ __forceinline__ int32_t spare_row(uint32_t i) const {
    return device_row(p.items, p.scratch[state * p.scratch_stride + i]);
  }

  // -------------------------------------------------------------------------------------------------------- columns

  __device__ __forceinline__ uint32_t step_of(uint32_t q) const {
    return kSteps ? p.columns.div(q) : 0;
  }
  __device__ __forceinline__ int64_t length_of(uint32_t step) const {
    return kSteps ? lengths[step] : length;
  }

  __device__ __forceinline__ Pack<int32_t, kColumnPack> tokens(uint32_t i) const {
    const int32_t* const from = p.top_k + row * p.top_k_stride[0];
    if (!kSteps && !p.blocks) return load_pack<kColumnPack>(from, i, p.columns.divisor, launch.set.vector_columns);
    if (kSteps && launch.set.vector_columns) {  // a pack is of one step then
      const uint32_t step = step_of(i * kColumnPack);
      const int32_t* const of_step = from + step * p.top_k_stride[1] - static_cast<int64_t>(step) * p.columns.divisor;
      return *reinterpret_cast<const Pack<int32_t, kColumnPack>*>(of_step + i * kColumnPack);
    }
    Pack<int32_t, kColumnPack> token;
#pragma unroll
    for (uint32_t j = 0; j < kColumnPack; ++j) {
      const uint32_t q = i * kColumnPack + j;
      const uint32_t step = step_of(q);
      const uint32_t column = q - step * p.columns.divisor;
      token.x[j] = q < columns() ? token_at(p, from + step * p.top_k_stride[1], column) : -1;
    }
    return token;
  }

  /// Tokens of columns q and on -> ids to look up, or -1. Writes what needs no look-up, if `writes`.
  __device__ __forceinline__ uint32_t
  locate(uint32_t q, const int32_t (&token)[kColumnPack], int32_t (&id)[kColumnPack], bool writes) const {
#pragma unroll
    for (uint32_t j = 0; j < kColumnPack; ++j) {
      id[j] = -1;
      if (q + j >= columns()) continue;
      const int64_t n = length_of(step_of(q + j));
      int32_t where = -1;
      if constexpr (kSteps) {
        if (may_be_extra(p, n, token[j])) where = extra_row(p, last_tokens, row_of + p.slots, token[j]);
        if (where < 0 && exists(p, n, token[j])) id[j] = token[j];
      } else if (may_be_extra(p, n, token[j])) {
        where = row_of_slot(p.slots);
      } else if (exists(p, n, token[j])) {
        id[j] = token[j];
      }
      if (id[j] < 0 && writes) write_column(q + j, where, false);
    }
    return 0;
  }

  __device__ __forceinline__ void count_valid(uint32_t) const {}

  __device__ __forceinline__ bool source(int32_t token, int64_t& source) const {
    source = host_row(p, state, token);
    return source >= 0;
  }

  // -------------------------------------------------------------------------------------------------------- results

  __device__ __forceinline__ int32_t* out_of(uint32_t q) const {
    const uint32_t step = step_of(q);
    return p.out + row * p.out_stride[0] + step * p.out_stride[1] + (q - step * p.columns.divisor);
  }

  __device__ __forceinline__ void write_columns(
      uint32_t q, const int32_t (&where)[kColumnPack], uint32_t pending, uint32_t) const {
    if (pending == (1u << kColumnPack) - 1 && launch.set.vector_out) [[likely]] {
      Pack<int32_t, kColumnPack> pack;
#pragma unroll
      for (uint32_t j = 0; j < kColumnPack; ++j) pack.x[j] = where[j];
      *reinterpret_cast<Pack<int32_t, kColumnPack>*>(out_of(q)) = pack;
      return;
    }
#pragma unroll
    for (uint32_t j = 0; j < kColumnPack; ++j) {
      if (pending >> j & 1) write_column(q + j, where[j], false);
    }
  }

  __device__ __forceinline__ void write_column(uint32_t q, int32_t where, bool) const {
    *out_of(q) = where;
  }

  __device__ __forceinline__ void write_miss(uint32_t m, int32_t, int64_t source, int32_t where, uint32_t) const {
    if (p.miss_src == nullptr) return;
    p.miss_src[row * p.plan_stride + m] = source;
    p.miss_dst[row * p.plan_stride + m] = where;
  }

  __device__ __forceinline__ void write_counts(uint32_t rank, uint32_t, uint32_t copies) const {
    if (rank != 0 || threadIdx.x != 0) return;
    if (p.miss_count) p.miss_count[row] = static_cast<int32_t>(copies);
    if constexpr (kSteps) p.state_misses[state] = static_cast<int32_t>(copies);
  }

  __device__ __forceinline__ void add_stats(uint32_t, uint32_t, uint32_t) const {}

  // ---------------------------------------------------------------------------------------------------------- copies

  __device__ __forceinline__ int64_t host_rows() const {
    return p.items.host_rows;
  }

  __device__ __forceinline__ ItemCopy copy_of(int64_t source, int32_t where) const {
    return {source, where};
  }

  template <typename Copies>
  __device__ __forceinline__ void copy(const Copies& copies, uint32_t count, uint32_t worker, uint32_t workers) const {
    hisparse::copy_rows<kLoadBatch>(
        ItemRows<Copies>{p.items, copies}, count, copied_bytes(p.items), launch.piece_bytes, worker, workers);
  }

 private:
  template <bool kShared>
  __device__ __forceinline__ static void load_word(int32_t* to, const int32_t* from) {
    if constexpr (kShared) {
      hisparse::async_copy_4(to, from);
    } else {
      *to = *from;
    }
  }
};

/// Outputs of a row that needs no resolution: where_of(q) each.
template <typename WhereOf>
__device__ __forceinline__ void write_row(
    const SwapInParams& p, uint32_t row, uint32_t rank, uint32_t blocks, WhereOf&& where_of) {
#pragma unroll 1
  for (uint32_t s = 0; s < p.steps; ++s) {
    int32_t* const out = p.out + row * p.out_stride[0] + s * p.out_stride[1];
    for (uint32_t c = rank * hisparse::kResolveThreads + threadIdx.x; c < p.columns.divisor;
         c += blocks * hisparse::kResolveThreads) {
      out[c] = where_of(c);
    }
  }
}

template <bool kSteps, Span kSpan>
__global__ void __launch_bounds__(hisparse::kResolveThreads, 1)
    load_kernel(const __grid_constant__ SwapInParams p, const __grid_constant__ LoadLaunch launch) {
  const uint32_t row = launch.first_row + (blockIdx.x >> launch.set.cluster_log2);
  const uint32_t blocks = 1u << launch.set.cluster_log2;
  const uint32_t rank = blockIdx.x & (blocks - 1);
  const bool first = rank == 0 && threadIdx.x == 0;
  if (is_padding(p.num_real, row)) {
    write_row(p, row, rank, blocks, [&](uint32_t) { return p.padded; });
    if (kSteps && first && p.miss_count) p.miss_count[row] = 0;
    return;
  }
  const int32_t state = state_of(p, row);
  const int64_t length = kSteps ? 0 : p.lengths.at(row);
  if (state < 0 || (!kSteps && is_short(p, length))) {
    const int32_t* const entries = p.top_k + row * p.top_k_stride[0];
    write_row(p, row, rank, blocks, [&](uint32_t c) {
      if (kSteps || state < 0) return -1;
      const int32_t slot = short_slot(p, length, c, token_at(p, entries, c));
      return slot < 0 ? -1 : device_row(p.items, p.locs[state * p.buffer_stride + slot]);
    });
    if (first && p.miss_count) p.miss_count[row] = 0;
    return;
  }
  char* const memory = kSpan == Span::kWide
                           ? launch.set.workspace + static_cast<int64_t>(blockIdx.x) * launch.set.layout.bytes
                           : hisparse::dynamic_shared();
  const Request<kSteps> request(p, launch, memory + launch.set.layout.own, row, state);
  hisparse::Resolver<Request<kSteps>, kSpan>(request, launch.set, memory, rank).resolve();
}

}  // namespace hotplan::device_buffer
