/// \file resolve.cuh
/// \brief Residency's addressing: a run of launch rows is a set, ids are host rows, slots lie in pages of the hot
/// cache.
#pragma once

#include <hotplan/hisparse/cache_rows.cuh>
#include <hotplan/hisparse/resolver.cuh>
#include <hotplan/hisparse/rules.h>

namespace hotplan::hisparse {

/// What a launch adds to the params.
struct ResolveLaunch {
  uint32_t first_row;  // of this launch
  SetLaunch set;
};

/// The run that a launch row is in. All lanes of a warp must call it.
__device__ __forceinline__ Run find_run(const ResolveParams& p, uint32_t row) {
  const int32_t request = request_of(p, row);
  Run run{RowKind::kFirst, request, state_of(p, request), 1};
  if (run.state < 0) run.kind = RowKind::kPadding;
  if (run.kind == RowKind::kPadding || p.max_union_rows == 0 || p.request_ids == nullptr) return run;
  // Rows of the same request in a row from `row` on, backwards or forwards, without `row`, at most `limit`.
  const auto neighbours = [&](bool forwards, uint32_t limit) {
    limit = min(limit, forwards ? p.rows - 1 - row : row);
    for (uint32_t done = 0; done < limit; done += kWarp) {
      const uint32_t distance = done + threadIdx.x % kWarp + 1;
      const bool same = distance <= limit && p.request_ids[forwards ? row + distance : row - distance] == request;
      const uint32_t others = ~__ballot_sync(kFullMask, same);
      if (others != 0) return done + __ffs(static_cast<int>(others)) - 1;
    }
    return limit;
  };
  const uint32_t before = neighbours(false, p.max_union_rows);
  if (before > 0) {
    run.kind = before < p.max_union_rows ? RowKind::kFollower : RowKind::kPadding;
  } else {
    run.rows = 1 + neighbours(true, p.max_union_rows - 1);
  }
  return run;
}

struct Residency {
  using LruSlot = int16_t;
  using Source = int32_t;
  static constexpr bool kSpare = false;  // a miss without a slot has no row

  const ResolveParams& p;
  bool vector_columns;
  bool vector_out;
  uint32_t row;  // first launch row of the run
  Run run;
  int64_t base;     // of the run's rows in contiguous outputs
  uint32_t* valid;  // [rows of the run]
  int32_t* pages;   // [pages of H slots]

  __device__ __forceinline__
  Residency(const ResolveParams& params, const SetLaunch& launch, char* own, uint32_t first_row, const Run& which)
      : p(params),
        vector_columns(launch.vector_columns),
        vector_out(launch.vector_out),
        row(first_row),
        run(which),
        base(static_cast<int64_t>(first_row) * params.top_k.divisor),
        valid(reinterpret_cast<uint32_t*>(own)),
        pages(reinterpret_cast<int32_t*>(own) + max_rows(params)) {}

  HOTPLAN_HD static uint32_t max_rows(const ResolveParams& p) {
    return p.max_union_rows > 0 && p.request_ids != nullptr ? min_of(p.max_union_rows, p.rows) : 1;
  }
  HOTPLAN_HD static uint32_t page_count(const ResolveParams& p) {
    return p.caches.block_size.div(p.hot_slots - 1) + 1;
  }
  HOTPLAN_HD static SetShape shape(const ResolveParams& p) {
    const uint32_t rows = max_rows(p);
    return {rows * p.top_k.divisor, p.hot_slots, 0, sizeof(Source), 4 * (rows + page_count(p))};
  }

  __device__ __forceinline__ uint32_t columns() const {
    return run.rows * p.top_k.divisor;
  }
  __device__ __forceinline__ uint32_t slots() const {
    return p.hot_slots;
  }
  __device__ __forceinline__ int16_t* lru() const {
    return p.lru + static_cast<int64_t>(run.state) * p.hot_slots;
  }
  __device__ __forceinline__ int32_t* held() const {
    return p.dgi + static_cast<int64_t>(run.state) * p.hot_slots;
  }

  /// Asks for what row_of_slot needs, and clears the counters.
  template <bool kShared>
  __device__ __forceinline__ void load_rows() const {
    const int32_t* const table = p.tables.hot.data + run.request * p.tables.hot.stride;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < page_count(p); i += kResolveThreads) {
      if constexpr (kShared) {
        async_copy_4(pages + i, table + i);
      } else {
        pages[i] = table[i];
      }
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < run.rows; i += kResolveThreads) valid[i] = 0;
  }
  __device__ __forceinline__ int32_t row_of_slot(uint32_t slot) const {
    return hot_row(p.caches, pages[p.caches.block_size.div(slot)], slot);
  }

  // -------------------------------------------------------------------------------------------------------- columns

  __device__ __forceinline__ Pack<int32_t, kColumnPack> tokens(uint32_t i) const {
    const int32_t* const from = p.ids + row * p.ids_stride;
    if (run.rows == 1) return load_pack<kColumnPack>(from, i, p.top_k.divisor, vector_columns);
    Pack<int32_t, kColumnPack> token;
#pragma unroll
    for (uint32_t j = 0; j < kColumnPack; ++j) {
      const uint32_t q = i * kColumnPack + j;
      const uint32_t r = p.top_k.div(q);
      token.x[j] = q < columns() ? from[r * p.ids_stride + (q - r * p.top_k.divisor)] : -1;
    }
    return token;
  }

  /// Tokens of columns q and on -> ids to look up, or -1. Writes what follows from a location alone, if `writes`.
  /// Returns how many are valid.
  __device__ __forceinline__ uint32_t
  locate(uint32_t q, const int32_t (&token)[kColumnPack], int32_t (&id)[kColumnPack], bool writes) const {
    // Without tables and outputs of its own, a column is its token: half the instructions of this step.
    if (!p.tables.source.data && !p.tables.resident.data && !p.resolved && !p.valid) {
#pragma unroll
      for (uint32_t j = 0; j < kColumnPack; ++j) {
        id[j] = static_cast<uint32_t>(token[j]) < p.tables.id_limit ? token[j] : -1;
        if (id[j] < 0 && writes && q + j < columns()) write_column(q + j, -1, false);
      }
      return 0;
    }
    TokenPages where[kColumnPack];
#pragma unroll
    for (uint32_t j = 0; j < kColumnPack; ++j) where[j] = look_up(p, run.request, token[j]);
    uint32_t count = 0;
#pragma unroll
    for (uint32_t j = 0; j < kColumnPack; ++j) {
      const Location at = locate_token(token[j], where[j]);
      id[j] = at.pending() ? at.id : -1;
      if (q + j >= columns()) continue;
      if (writes) write_located(q + j, at);
      if (!at.valid()) continue;
      if (run.rows == 1) {
        ++count;
      } else {
        atomicAdd(valid + p.top_k.div(q + j), 1u);
      }
    }
    return count;
  }

  __device__ __forceinline__ Location locate_token(int32_t token, const TokenPages& where) const {
    return hotplan::hisparse::locate(p, token, where);
  }

  /// All lanes of a warp must call it.
  __device__ __forceinline__ void count_valid(uint32_t count) const {
    if (p.valid == nullptr || run.rows != 1) return;
    count = warp_sum(count);
    if (threadIdx.x % kWarp == 0 && count != 0) atomicAdd(valid, count);
  }

  __device__ __forceinline__ bool source(int32_t id, int32_t& source) const {
    source = id;
    return true;
  }

  // -------------------------------------------------------------------------------------------------------- results

  /// Outputs that follow from the location alone. A pending column gets its hot row later.
  __device__ __forceinline__ void write_located(uint32_t q, const Location& at) const {
    if (p.resolved) p.resolved[base + q] = at.id;
    if (!at.pending()) write_column(q, at.resident, false);
  }

  /// The rows of columns q and on that are in `pending`; a bit per column, likewise in `copied`.
  __device__ __forceinline__ void write_columns(
      uint32_t q, const int32_t (&where)[kColumnPack], uint32_t pending, uint32_t copied) const {
    if (pending == (1u << kColumnPack) - 1 && vector_out && p.attention == nullptr) [[likely]] {
      Pack<int32_t, kColumnPack> pack;
#pragma unroll
      for (uint32_t j = 0; j < kColumnPack; ++j) pack.x[j] = where[j];
      *reinterpret_cast<Pack<int32_t, kColumnPack>*>(p.hot + base + q) = pack;
      if (p.mask == nullptr) return;
#pragma unroll
      for (uint32_t j = 0; j < kColumnPack; ++j) pack.x[j] = copied >> j & 1;
      *reinterpret_cast<Pack<int32_t, kColumnPack>*>(p.mask + base + q) = pack;
      return;
    }
#pragma unroll
    for (uint32_t j = 0; j < kColumnPack; ++j) {
      if (pending >> j & 1) write_column(q + j, where[j], copied >> j & 1);
    }
  }

  __device__ __forceinline__ void write_column(uint32_t q, int32_t where, bool copied) const {
    p.hot[base + q] = where;
    if (p.mask) p.mask[base + q] = copied;
    if (p.attention) {
      const uint32_t i = run.rows == 1 ? 0 : p.top_k.div(q);
      const int64_t to = (row + i) * p.attention_stride + (q - i * p.top_k.divisor);
      p.attention[to] = attention_index(p.caches, p.attention_block_stride, where);
    }
  }

  __device__ __forceinline__ void write_miss(uint32_t m, int32_t id, int32_t, int32_t where, uint32_t q) const {
    if (p.swap_host) {
      p.swap_host[base + m] = id;
      p.swap_device[base + m] = where;
    }
    if (p.plan) p.plan[base + m] = SwapRow{id, where, q};
  }

  /// Counts of the run's rows, and the plan's invalid rows.
  __device__ __forceinline__ void write_counts(uint32_t rank, uint32_t blocks, uint32_t loads) const {
    const uint32_t top_k = p.top_k.divisor;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; rank == 0 && i < run.rows; i += kResolveThreads) {
      const uint32_t before = min(loads, i * top_k);
      if (p.swap_counts) p.swap_counts[row + i] = static_cast<int32_t>(min(loads - before, top_k));
      if (p.valid) p.valid[(row + i) * p.valid_stride] = static_cast<int32_t>(valid[i]);
    }
    if (p.plan) {
      const uint32_t stride = kResolveThreads * blocks;
#pragma unroll 1
      for (uint32_t m = loads + rank * kResolveThreads + threadIdx.x; m < columns(); m += stride) {
        p.plan[base + m] = SwapRow::invalid();
      }
    }
  }

  __device__ __forceinline__ void add_stats(uint32_t rank, uint32_t hits, uint32_t misses) const {
    if (threadIdx.x != 0 || rank != 0 || p.stats == nullptr) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(p.stats), static_cast<unsigned long long>(hits));
    atomicAdd(reinterpret_cast<unsigned long long*>(p.stats) + 1, static_cast<unsigned long long>(misses));
  }

  __device__ __forceinline__ void write_padding(uint32_t rank, uint32_t blocks) const {
#pragma unroll 1
    for (uint32_t c = rank * kResolveThreads + threadIdx.x; c < p.top_k.divisor; c += kResolveThreads * blocks) {
      write_located(c, Location{-1, -1});
    }
    if (threadIdx.x == 0) valid[0] = 0;
    __syncthreads();
    write_counts(rank, blocks, 0);
  }

  // ---------------------------------------------------------------------------------------------------------- copies

  __device__ __forceinline__ RowCopy copy_of(int32_t id, int32_t where) const {
    return {id, where};
  }

  __device__ __forceinline__ int64_t host_rows() const {
    return p.caches.host_rows;
  }

  /// launch.copy is set for rows that can be copied in 16-byte pieces.
  template <typename Copies>
  __device__ __forceinline__ void copy(const Copies& copies, uint32_t count, uint32_t worker, uint32_t workers) const {
    const auto row_bytes = static_cast<uint32_t>(p.caches.row_bytes);
    copy_rows<4>(CacheRows<Copies>{p.caches, copies}, count, row_bytes, 16, worker, workers);
  }
};

template <Span kSpan>
__global__ void __launch_bounds__(kResolveThreads, 1)
    resolve_kernel(const __grid_constant__ ResolveParams params, const __grid_constant__ ResolveLaunch launch) {
  const uint32_t row = launch.first_row + (blockIdx.x >> launch.set.cluster_log2);
  const uint32_t rank = blockIdx.x & ((1u << launch.set.cluster_log2) - 1);
  const Run run = find_run(params, row);
  if (run.kind == RowKind::kFollower) return;
  char* const memory = kSpan == Span::kWide
                           ? launch.set.workspace + static_cast<int64_t>(blockIdx.x) * launch.set.layout.bytes
                           : dynamic_shared();
  const Residency residency(params, launch.set, memory + launch.set.layout.own, row, run);
  if (run.kind == RowKind::kPadding) {
    residency.write_padding(rank, 1u << launch.set.cluster_log2);
  } else {
    Resolver<Residency, kSpan>(residency, launch.set, memory, rank).resolve();
  }
}

}  // namespace hotplan::hisparse
