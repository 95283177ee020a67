/// \file resolve.cuh
/// \brief The resolution kernel: a block, or a cluster of blocks that all compute the same, per run of launch rows.
///
/// 1. Everything that is needed from global memory is asked for at once: ids by column, the LRU by position, what slots
///    hold by slot. Meanwhile the tables are cleared.
/// 2. Columns become ids and go into a hash table; the LRU is inverted.
/// 3. Slots look their ids up: hits, by slot, by column and, through the inverse, by position.
/// 4. One scan numbers the hits along the LRU and the misses along the columns, and everything has its place: the m-th
///    miss takes the m-th victim, the new LRU is a stable partition of the old one.
/// 5. Outputs are written, and the rows copied where that is asked for.
/// State that is corrupt shows in counts that do not match; it is repaired then and step 4 done again.
///
/// Blocks of a cluster share the work of step 5 alone. They exchange nothing: a barrier keeps each from writing state
/// that another still reads. So one request's copies have several SMs' worth of reads under way, in the same launch.
#pragma once

#include <hotplan/hisparse/copy.cuh>
#include <hotplan/hisparse/hot_set.cuh>
#include <hotplan/hisparse/layout.h>
#include <hotplan/hisparse/lru.cuh>
#include <hotplan/hisparse/rules.h>

#include <type_traits>

namespace hotplan::hisparse {

/// What a launch adds to the params.
struct ResolveLaunch {
  uint32_t first_row;     // of this launch
  uint32_t cluster_log2;  // blocks per launch row
  bool vector_state;      // state rows can be read and written 16 bytes at a time
  bool copy;
  char* workspace;  // wide: layout.bytes for every block
  ResolveLayout layout;
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

template <bool kWide>
struct Resolver {
  static constexpr uint32_t kThreads = kResolveThreads;
  using Index = std::conditional_t<kWide, uint32_t, uint16_t>;
  using Word = std::conditional_t<kWide, uint64_t, uint32_t>;

  // What stands in slot_of: a slot that is hit, a miss's number with a mark, or none.
  static constexpr Index kNone = static_cast<Index>(~Index{0});
  static constexpr Index kMissed = static_cast<Index>(Index{1} << (sizeof(Index) * 8 - 1));

  // What a thread has under way: columns whose tables it reads, and packs of dgi. The wide route is to be small.
  static constexpr uint32_t kBatch = kWide ? 1 : 2;
  static constexpr uint32_t kDgiPacks = 1;

  __device__ __forceinline__ static uint32_t miss_of(Index at) {
    return at & static_cast<Index>(~kMissed);
  }

  const ResolveParams& p;
  const ResolveLaunch& launch;
  uint32_t row;   // first launch row of the run
  uint32_t rank;  // of the block among those of its cluster
  Run run;
  uint32_t references;  // Q
  int64_t base;         // of the run's rows in contiguous outputs

  int32_t* ids;
  Index* slot_of;
  Lru<kThreads> lru;
  HotSet<Index> set;
  uint32_t* valid;
  int32_t* pages;
  WarpTotals<Word>* totals;
  uint32_t* has_duplicates;
  uint16_t* new_order;
  uint16_t* victims;
  Index* miss_columns;

  __device__ __forceinline__ Resolver(
      const ResolveParams& params, const ResolveLaunch& how, char* memory, uint32_t first_row, uint32_t cluster_rank,
      const Run& which)
      : p(params), launch(how), row(first_row), rank(cluster_rank), run(which) {
    const ResolveLayout& l = how.layout;
    references = run.rows * p.top_k.divisor;
    base = static_cast<int64_t>(row) * p.top_k.divisor;
    ids = reinterpret_cast<int32_t*>(memory + l.ids);
    slot_of = reinterpret_cast<Index*>(memory + l.slot_of);
    lru.slots = p.hot_slots;
    lru.order = reinterpret_cast<uint16_t*>(memory + l.order);
    lru.position_of = reinterpret_cast<uint16_t*>(memory + l.position_of);
    lru.hit_at = reinterpret_cast<uint8_t*>(memory + l.hit_at);
    valid = reinterpret_cast<uint32_t*>(memory + l.valid);
    pages = reinterpret_cast<int32_t*>(memory + l.pages);
    totals = reinterpret_cast<WarpTotals<Word>*>(memory + l.totals);
    has_duplicates = reinterpret_cast<uint32_t*>(memory + l.totals + sizeof(WarpTotals<Word>));
    set.keys = reinterpret_cast<int32_t*>(memory + l.keys);
    set.columns = reinterpret_cast<Index*>(memory + l.columns);
    set.size = l.table_factor * 4 * packs();
    new_order = reinterpret_cast<uint16_t*>(memory + l.new_order);
    victims = reinterpret_cast<uint16_t*>(memory + l.victims);
    miss_columns = reinterpret_cast<Index*>(memory + l.miss_columns);
  }

  /// References come in packs of 4; those past the last one are padding.
  __device__ __forceinline__ uint32_t packs() const {
    return div_ceil(references, 4u);
  }
  __device__ __forceinline__ uint32_t blocks() const {
    return 1u << launch.cluster_log2;
  }
  /// Whether work item `i` of those that the cluster shares is this block's.
  __device__ __forceinline__ bool mine(uint32_t i) const {
    return (i & (blocks() - 1)) == rank;
  }
  __device__ __forceinline__ int16_t* lru_row() const {
    return p.lru + static_cast<int64_t>(run.state) * p.hot_slots;
  }
  __device__ __forceinline__ int32_t* dgi_row() const {
    return p.dgi + static_cast<int64_t>(run.state) * p.hot_slots;
  }
  __device__ __forceinline__ uint32_t page_count() const {
    return p.caches.block_size.div(p.hot_slots - 1) + 1;
  }
  __device__ __forceinline__ int32_t row_of_slot(uint32_t slot) const {
    return hot_row(p.caches, pages[p.caches.block_size.div(slot)], slot);
  }

  // -------------------------------------------------------------------------------------------------------- columns

  /// Tokens of the batch that begins at `column` of row `i`: one per thread, and the same further on.
  __device__ __forceinline__ void load_tokens(int32_t (&token)[kBatch], uint32_t i, uint32_t column) const {
    const int32_t* from = p.ids + static_cast<int64_t>(row + i) * p.ids_stride;
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) {
      const uint32_t c = column + j * kThreads + threadIdx.x;
      token[j] = c < p.top_k.divisor ? from[c] : -1;
    }
  }

  /// Outputs that follow from the location alone. A pending column gets its hot row later. `q` is the reference.
  __device__ __forceinline__ void write_located(uint32_t q, const Location& at) const {
    if (p.resolved) p.resolved[base + q] = at.id;
    if (!at.pending()) write_column(q, at.resident, false);
  }

  __device__ __forceinline__ void write_column(uint32_t q, int32_t where, bool loads) const {
    p.hot[base + q] = where;
    if (p.mask) p.mask[base + q] = loads;
    if (p.attention) {
      const uint32_t i = run.rows == 1 ? 0 : p.top_k.div(q);
      const int64_t to = (row + i) * p.attention_stride + (q - i * p.top_k.divisor);
      p.attention[to] = attention_index(p.caches, p.attention_block_stride, where);
    }
  }

  /// Columns -> ids, and into the set. Returns whether any of this thread's is pending.
  __device__ __forceinline__ bool insert_columns(int32_t (&token)[kBatch]) const {
    const uint32_t top_k = p.top_k.divisor;
    bool pending = false;
    bool duplicate = false;
    uint32_t i = 0;
    uint32_t column = 0;
    // Without tables and outputs of its own, a column is its token: half the instructions of this step.
    const bool plain = !p.tables.source.data && !p.tables.resident.data && !p.resolved && !p.valid;
#pragma unroll 1
    for (uint32_t batch = 0; i < run.rows; ++batch) {
      int32_t current[kBatch];
      TokenPages where[kBatch];
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        current[j] = token[j];
        if (!plain) where[j] = look_up(p, run.request, current[j]);
      }
      const uint32_t this_row = i;
      const uint32_t this_column = column;
      column += kBatch * kThreads;
      if (column >= top_k) {
        column = 0;
        ++i;
      }
      if (i < run.rows) load_tokens(token, i, column);

      int32_t id[kBatch];  // to insert
      uint32_t count = 0;
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        const uint32_t c = this_column + j * kThreads + threadIdx.x;
        if (plain) {
          id[j] = static_cast<uint32_t>(current[j]) < p.tables.id_limit ? current[j] : -1;
          if (c < top_k) {
            ids[this_row * top_k + c] = id[j];
            if (id[j] < 0 && mine(batch * kBatch + j)) write_column(this_row * top_k + c, -1, false);
          }
        } else {
          const Location at = locate(p, current[j], where[j]);
          id[j] = at.pending() ? at.id : -1;
          if (c < top_k) {
            ids[this_row * top_k + c] = id[j];
            if (mine(batch * kBatch + j)) write_located(this_row * top_k + c, at);
          }
          count += at.valid();
        }
        pending |= id[j] >= 0;
      }
      duplicate |= set.insert(id, this_row * top_k + this_column + threadIdx.x, kThreads);
      if (p.valid) {
        count = warp_sum(count);
        if (threadIdx.x % kWarp == 0 && count != 0) atomicAdd(valid + this_row, count);
      }
    }
    if (duplicate) atomicOr(has_duplicates, 1u);
    return pending;
  }

  /// The first column that names an id owns it; the others point to it.
  __device__ __forceinline__ void resolve_duplicates() const {
#pragma unroll 1
    for (uint32_t q = threadIdx.x; q < references; q += kThreads) {
      if (ids[q] >= 0) atomic_min(set.columns + set.entry_of(ids[q]), q);
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t q = threadIdx.x; q < references; q += kThreads) {
      if (ids[q] < 0) continue;
      const uint32_t owner = set.columns[set.entry_of(ids[q])];
      if (owner != q) ids[q] = -2 - static_cast<int32_t>(owner);
    }
  }

  // ---------------------------------------------------------------------------------------------------------- slots

  __device__ __forceinline__ void load_dgi(Pack<int32_t, 4> (&pack)[kDgiPacks], uint32_t first) const {
#pragma unroll
    for (uint32_t i = 0; i < kDgiPacks; ++i) {
      const uint32_t index = first + i * kThreads + threadIdx.x;
      if (index * 4 < p.hot_slots) pack[i] = load_pack<4>(dgi_row(), index, p.hot_slots, launch.vector_state);
    }
  }

  /// Slots -> hits. Returns whether one of this thread's slots is missing in the LRU.
  __device__ __forceinline__ bool mark_hits(Pack<int32_t, 4> (&pack)[kDgiPacks]) const {
    bool missing = false;
#pragma unroll 1
    for (uint32_t first = 0; first * 4 < p.hot_slots; first += kDgiPacks * kThreads) {
      if (first > 0) load_dgi(pack, first);
#pragma unroll
      for (uint32_t i = 0; i < kDgiPacks; ++i) {
        const uint32_t index = first + i * kThreads + threadIdx.x;
        if (index * 4 >= p.hot_slots) continue;
        const Pack<uint16_t, 4> position = pack_at<4>(lru.position_of, index);
        uint32_t column[4];
        set.find(pack[i].x, column);
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          const uint32_t slot = index * 4 + j;
          const bool nowhere = position.x[j] == Lru<kThreads>::kNowhere;
          missing |= nowhere && slot < p.hot_slots;
          if (column[j] == HotSet<Index>::kNone || nowhere) continue;
          slot_of[column[j]] = static_cast<Index>(slot);
          lru.hit_at[position.x[j]] = 1;
        }
      }
    }
    return missing;
  }

  /// Numbers of hits by position and misses by column; sums of references and of columns that are hit.
  __device__ __forceinline__ Scanned<Word> count() const {
    uint32_t misses = 0;
    uint32_t pending = 0;
    uint32_t found = 0;
    for_own_references([&](uint32_t, int32_t id, Index slot) {
      pending += id != -1;
      misses += id >= 0 && slot == kNone;
      found += id >= 0 && slot != kNone;
    });
    return block_scan<kThreads>(Pair<Word>::of(lru.count_hits(), misses), Pair<Word>::of(pending, found), *totals);
  }

  /// body(reference, id, slot_of) for the packs of references that are this thread's in a scan.
  template <typename Body>
  __device__ __forceinline__ void for_own_references(Body&& body) const {
    const uint32_t each = div_ceil(packs(), kThreads);
    const uint32_t begin = threadIdx.x * each;
    const uint32_t end = min(begin + each, packs());
#pragma unroll 1
    for (uint32_t i = begin; i < end; ++i) {
      const Pack<int32_t, 4> id = pack_at<4>(ids, i);
      const Pack<Index, 4> slot = pack_at<4>(slot_of, i);
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) body(i * 4 + j, id.x[j], slot.x[j]);
    }
  }

  /// Corrupt state: the LRU becomes a permutation, and of an id's copies the most recently used one is the hit.
  __device__ __forceinline__ void repair(bool lru_too) const {
    if (lru_too) lru.repair(*totals);
    lru.clear_hits();
#pragma unroll 1
    for (uint32_t q = threadIdx.x; q < references; q += kThreads) slot_of[q] = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t slot = threadIdx.x; slot < p.hot_slots; slot += kThreads) {
      const int32_t id[1] = {dgi_row()[slot]};
      uint32_t column[1];
      set.find(id, column);
      if (column[0] != HotSet<Index>::kNone) atomic_max(slot_of + column[0], lru.position_of[slot] + 1u);
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t q = threadIdx.x; q < references; q += kThreads) {
      const uint32_t after = slot_of[q];
      slot_of[q] = after == 0 ? kNone : static_cast<Index>(lru.order[after - 1]);
      if (after != 0) lru.hit_at[after - 1] = 1;
    }
    __syncthreads();
  }

  // --------------------------------------------------------------------------------------------------------- results

  /// Numbers the misses that get a slot.
  __device__ __forceinline__ void number_misses(uint32_t m, uint32_t loads) const {
    for_own_references([&](uint32_t q, int32_t id, Index slot) {
      if (id < 0 || slot != kNone) return;
      if (m < loads) {
        slot_of[q] = static_cast<Index>(kMissed | m);
        miss_columns[m] = static_cast<Index>(q);
      }
      ++m;
    });
  }

  /// Hot rows of pending columns, and with those that own a miss its copy and the slot's new id. The reads of kBatch
  /// columns are under way together, step by step: id, slot or miss, victim, page.
  __device__ __forceinline__ void write_columns() const {
    const uint32_t stride = kThreads * blocks();
#pragma unroll 1
    for (uint32_t first = rank * kThreads + threadIdx.x; first < references; first += kBatch * stride) {
      int32_t id[kBatch];
      Index at[kBatch];
      uint32_t slot[kBatch];
      int32_t where[kBatch];
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        const uint32_t q = first + j * stride;
        id[j] = q < references ? ids[q] : -1;
      }
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        const uint32_t owner = id[j] >= 0 ? first + j * stride : static_cast<uint32_t>(-2 - id[j]);
        at[j] = id[j] != -1 ? slot_of[owner] : kNone;
      }
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        slot[j] = at[j] != kNone && (at[j] & kMissed) ? victims[miss_of(at[j])] : at[j];
      }
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) where[j] = at[j] != kNone ? row_of_slot(slot[j]) : -1;
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        if (id[j] == -1) continue;
        const uint32_t q = first + j * stride;
        const bool missed = at[j] != kNone && (at[j] & kMissed) && id[j] >= 0;
        if (missed) {
          const int64_t m = base + miss_of(at[j]);
          dgi_row()[slot[j]] = where[j] >= 0 ? id[j] : -1;
          if (p.swap_host) {
            p.swap_host[m] = id[j];
            p.swap_device[m] = where[j];
          }
          if (p.plan) p.plan[m] = SwapRow{id[j], where[j], q};
        }
        write_column(q, where[j], missed && where[j] >= 0);
      }
    }
  }

  __device__ __forceinline__ void write_lru() const {
    int16_t* to = lru_row();
    const auto* from = reinterpret_cast<const int16_t*>(new_order);
    const uint32_t first = rank * kThreads + threadIdx.x;
    if (launch.vector_state) {
#pragma unroll 1
      for (uint32_t i = first; i < p.hot_slots / 8; i += kThreads * blocks()) {
        reinterpret_cast<Pack<int16_t, 8>*>(to)[i] = reinterpret_cast<const Pack<int16_t, 8>*>(from)[i];
      }
    } else {
#pragma unroll 1
      for (uint32_t i = first; i < p.hot_slots; i += kThreads * blocks()) to[i] = from[i];
    }
  }

  /// Counts of the run's rows, and the plan's invalid rows.
  __device__ __forceinline__ void write_counts(uint32_t loads) const {
    const uint32_t top_k = p.top_k.divisor;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; rank == 0 && i < run.rows; i += kThreads) {
      const uint32_t before = min(loads, i * top_k);
      if (p.swap_counts) p.swap_counts[row + i] = static_cast<int32_t>(min(loads - before, top_k));
      if (p.valid) p.valid[(row + i) * p.valid_stride] = static_cast<int32_t>(valid[i]);
    }
    if (p.plan) {
      const uint32_t stride = kThreads * blocks();
#pragma unroll 1
      for (uint32_t m = loads + rank * kThreads + threadIdx.x; m < references; m += stride) {
        p.plan[base + m] = SwapRow::invalid();
      }
    }
  }

  __device__ __forceinline__ void add_stats(uint32_t hits, uint32_t misses) const {
    if (p.stats == nullptr || rank != 0 || threadIdx.x != 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(p.stats), static_cast<unsigned long long>(hits));
    atomicAdd(reinterpret_cast<unsigned long long*>(p.stats) + 1, static_cast<unsigned long long>(misses));
  }

  /// Copy m, for copy_rows.
  __device__ __forceinline__ RowCopy at(uint32_t m) const {
    return {ids[miss_columns[m]], row_of_slot(victims[m])};
  }

  __device__ __forceinline__ void resolve() const {
    // 1. Loads, and what can be done before they arrive.
    int32_t token[kBatch];
    Pack<int32_t, 4> dgi_packs[kDgiPacks];
    load_tokens(token, 0, 0);
    lru.load(lru_row(), !kWide, launch.vector_state);
    load_dgi(dgi_packs, 0);
    const int32_t* const table = p.tables.hot.data + run.request * p.tables.hot.stride;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < page_count(); i += kThreads) pages[i] = table[i];
    set.template clear<kThreads>();
    lru.clear();
    for (uint32_t i = threadIdx.x; i < packs(); i += kThreads) {
      pack_at<4>(slot_of, i) = Pack<Index, 4>{{kNone, kNone, kNone, kNone}};
    }
    if (references + threadIdx.x < packs() * 4) ids[references + threadIdx.x] = -1;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < run.rows; i += kThreads) valid[i] = 0;
    if (threadIdx.x == 0) *has_duplicates = 0;
    __syncthreads();

    // 2. Ids and LRU into shared memory.
    const bool pending = insert_columns(token);
    lru.invert();
    if (!__syncthreads_or(pending)) {
      write_counts(0);
      return;
    }
    if (*has_duplicates) resolve_duplicates();

    // 3. Hits.
    const bool corrupt = __syncthreads_or(mark_hits(dgi_packs));

    // 4. Numbers. Where the hit slots are not as many as the ids found in them, an id has several slots.
    Scanned<Word> scanned;
#pragma unroll 1
    for (bool repaired = false;; repaired = true) {
      scanned = count();
      if (repaired || (!corrupt && scanned.total.first() == scanned.sum.second())) break;
      repair(corrupt);
    }
    if (launch.cluster_log2 != 0) cluster_arrive();  // this block has read the state
    const uint32_t hits = scanned.total.first();
    const uint32_t misses = scanned.total.second();
    const Partition target{p.hot_slots, hits, min(misses, p.hot_slots - hits)};
    lru.partition(target, scanned.before.first(), new_order, victims);
    number_misses(scanned.before.second(), target.loads);
    __syncthreads();
    if (launch.cluster_log2 != 0) cluster_wait();

    // 5. Results.
    write_columns();
    write_lru();
    write_counts(target.loads);
    add_stats(scanned.sum.first() - misses, misses);
    if constexpr (!kWide) {
      if (launch.copy && target.loads > 0) {
        constexpr uint32_t kWarps = kThreads / kWarp;
        copy_rows<4, uint4>(p.caches, *this, target.loads, rank * kWarps + threadIdx.x / kWarp, kWarps * blocks());
      }
    }
  }

  __device__ __forceinline__ void write_padding() const {
#pragma unroll 1
    for (uint32_t c = rank * kThreads + threadIdx.x; c < p.top_k.divisor; c += kThreads * blocks()) {
      write_located(c, Location{-1, -1});
    }
    if (threadIdx.x == 0) valid[0] = 0;
    __syncthreads();
    write_counts(0);
  }
};

template <bool kWide>
__global__ void __launch_bounds__(kResolveThreads, 1)
    resolve_kernel(const __grid_constant__ ResolveParams params, const __grid_constant__ ResolveLaunch launch) {
  const uint32_t row = launch.first_row + (blockIdx.x >> launch.cluster_log2);
  const uint32_t rank = blockIdx.x & ((1u << launch.cluster_log2) - 1);
  const Run run = find_run(params, row);
  if (run.kind == RowKind::kFollower) return;
  char* const memory =
      kWide ? launch.workspace + static_cast<int64_t>(blockIdx.x) * launch.layout.bytes : dynamic_shared();
  const Resolver<kWide> resolver(params, launch, memory, row, rank, run);
  if (run.kind == RowKind::kPadding) {
    resolver.write_padding();
  } else {
    resolver.resolve();
  }
}

}  // namespace hotplan::hisparse
