/// \file resolver.cuh
/// \brief The resolution of one set of columns against one LRU row, by a block or by all blocks of a cluster alike.
///
/// 1. Everything that is needed from global memory is asked for at once: what columns ask for, the LRU by position,
///    what slots hold by slot. Meanwhile the tables are cleared.
/// 2. Columns become ids and go into a hash table; the LRU marks the slots that it names.
/// 3. Slots look their ids up: hits, by slot and by column. A slot without a mark betrays a corrupt LRU.
/// 4. One scan numbers the hits along the LRU and the misses along the columns, and everything has its place: the m-th
///    miss takes the m-th victim, the new LRU is a stable partition of the old one.
/// 5. Outputs are written, and the rows copied where that is asked for, in the order of the host's memory where there
///    are many.
/// State that is corrupt shows in marks and counts that do not match; it is repaired then and step 4 done again.
///
/// Blocks of a cluster share the work of step 5 alone. They exchange nothing; a barrier keeps each from writing state
/// that another still reads. So one request's copies have several SMs' worth of reads under way, in the same launch.
///
/// Where a set is small enough (Span::kTile) a thread keeps its columns and slots in registers all the way;
/// the bound is instructions (NOTES.md), and loads and stores of shared memory were most of them.
///
/// An Addressing says what columns, slots and rows mean: residency in resolve.cuh, SGLang's tables in
/// device_buffer/load.cuh.
#pragma once

#include <hotplan/hisparse/copy.cuh>
#include <hotplan/hisparse/hot_set.cuh>
#include <hotplan/hisparse/layout.h>
#include <hotplan/hisparse/lru.cuh>

#include <type_traits>

namespace hotplan::hisparse {

/// Copies of a block, and blocks of a launch, from which on sorting pays: 128 requests at 10 % of misses took 348 us
/// instead of 391, 8 requests at 100 % 203 instead of 213; but one request at 50 %, in eight blocks, 23.0 instead
/// of 21.8.
inline constexpr uint32_t kSortedCopies = 128;
inline constexpr uint32_t kSortedBlocks = 64;

/// What a launch says about a resolution, beside the family's params.
struct SetLaunch {
  uint32_t cluster_log2;  // blocks per set
  bool vector_columns;    // rows of columns, of the LRU and of held ids can be read a pack at a time
  bool vector_lru;
  bool vector_held;
  bool vector_out;  // and rows of outputs be written
  bool copy;
  char* workspace;  // wide: layout.bytes for every block
  SetLayout layout;
};

template <typename Addressing, Span kSpan>
struct Resolver {
  static constexpr bool kTile = kSpan == Span::kTile;
  static constexpr bool kWide = kSpan == Span::kWide;
  static constexpr uint32_t kThreads = kResolveThreads;
  using Index = std::conditional_t<kWide, uint32_t, uint16_t>;
  using Word = std::conditional_t<kWide, uint64_t, uint32_t>;
  using LruSlot = typename Addressing::LruSlot;
  using Source = typename Addressing::Source;
  using Columns = Pack<int32_t, kColumnPack>;
  using Slots = Pack<uint16_t, kSlotPack>;
  using Held = Pack<int32_t, kSlotPack>;

  // What stands in slot_of: a slot that is hit, a miss's number with a mark, none, or that the column is to have none.
  static constexpr Index kNone = static_cast<Index>(~Index{0});
  static constexpr Index kNowhere = static_cast<Index>(kNone - 1);
  static constexpr Index kMissed = static_cast<Index>(Index{1} << (sizeof(Index) * 8 - 1));

  /// A thread's own elements: all that it has (kTile), or the first pack of each, which is asked for early.
  struct Own {
    Columns id;
    Slots order;
    Held held;
    Source source[kColumnPack];
    uint32_t hits;  // a bit per slot of `order`
  };

  const Addressing& a;
  const SetLaunch& launch;
  uint32_t rank;  // of the block among those of its cluster
  int32_t* ids;
  Index* slot_of;
  uint16_t* new_order;
  uint16_t* victims;
  Source* sources;
  Lru lru;
  HotSet<Index> set;
  WarpTotals<Word>* totals;
  uint32_t* has_duplicates;

  __device__ __forceinline__
  Resolver(const Addressing& addressing, const SetLaunch& how, char* memory, uint32_t cluster_rank)
      : a(addressing), launch(how), rank(cluster_rank) {
    const SetLayout& l = how.layout;
    ids = reinterpret_cast<int32_t*>(memory + l.ids);
    slot_of = reinterpret_cast<Index*>(memory + l.slot_of);
    new_order = reinterpret_cast<uint16_t*>(memory + l.new_order);
    victims = reinterpret_cast<uint16_t*>(memory + l.victims);
    sources = reinterpret_cast<Source*>(memory + l.sources);
    lru.slots = a.slots();
    lru.order = reinterpret_cast<uint16_t*>(memory + l.order);
    lru.position_of = new_order;
    lru.flags = reinterpret_cast<uint8_t*>(memory + l.flags);
    set.keys = reinterpret_cast<int32_t*>(memory + l.keys);
    set.columns = reinterpret_cast<Index*>(memory + l.columns);
    set.size = l.table_size;
    totals = reinterpret_cast<WarpTotals<Word>*>(memory + l.totals);
    has_duplicates = reinterpret_cast<uint32_t*>(memory + l.totals + sizeof(WarpTotals<Word>));
  }

  // --------------------------------------------------------------------------------------------------------- elements

  __device__ __forceinline__ uint32_t column_packs() const {
    return div_ceil(a.columns(), kColumnPack);
  }
  __device__ __forceinline__ uint32_t slot_packs() const {
    return div_ceil(a.slots(), kSlotPack);
  }
  __device__ __forceinline__ uint32_t blocks() const {
    return 1u << launch.cluster_log2;
  }
  /// Whether this warp's part of the results is this block's to write.
  __device__ __forceinline__ bool mine() const {
    return (threadIdx.x / kWarp & (blocks() - 1)) == rank;
  }

  /// body(pack), in any order.
  template <typename Body>
  __device__ __forceinline__ void for_packs(uint32_t count, Body&& body) const {
    if constexpr (kTile) {
      if (threadIdx.x < count) body(threadIdx.x);
    } else {
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < count; i += kThreads) body(i);
    }
  }

  /// body(pack) for neighbouring packs, as a scan needs them.
  template <typename Body>
  __device__ __forceinline__ void for_own_packs(uint32_t count, Body&& body) const {
    if constexpr (kTile) {
      if (threadIdx.x < count) body(threadIdx.x);
    } else {
      for_neighbours<kThreads>(count, body);
    }
  }

  __device__ __forceinline__ Columns id_pack(const Own& own, uint32_t i) const {
    return kTile ? own.id : pack_at<kColumnPack>(ids, i);
  }
  __device__ __forceinline__ Slots order_pack(const Own& own, uint32_t i) const {
    return kTile ? own.order : pack_at<kSlotPack>(lru.order, i);
  }
  __device__ __forceinline__ Held load_held(uint32_t i) const {
    return load_pack<kSlotPack>(a.held(), i, a.slots(), launch.vector_held);
  }
  __device__ __forceinline__ uint32_t hits_of(const Slots& slot) const {
    uint32_t hits = 0;
#pragma unroll
    for (uint32_t j = 0; j < kSlotPack; ++j) {
      if (slot.x[j] < a.slots()) hits |= static_cast<uint32_t>(lru.flags[slot.x[j]]) << j;
    }
    return hits;
  }

  __device__ __forceinline__ void fill_slot_of(Index x) const {
    for_packs(column_packs(), [&](uint32_t i) { pack_at<kColumnPack>(slot_of, i) = {{x, x}}; });
  }

  __device__ __forceinline__ Slots load_order(uint32_t i) const {
    const auto from = load_pack<kSlotPack>(a.lru(), i, a.slots(), launch.vector_lru);
    Slots to;
#pragma unroll
    for (uint32_t j = 0; j < kSlotPack; ++j) to.x[j] = Lru::checked(from.x[j]);
    return to;
  }

  // --------------------------------------------------------------------------------------------------------- 1. loads

  __device__ __forceinline__ void start(Own& own) const {
    own.id = threadIdx.x < column_packs() ? a.tokens(threadIdx.x) : Columns{{-1, -1}};
    if (threadIdx.x < slot_packs()) own.order = load_order(threadIdx.x);
    if (threadIdx.x < slot_packs()) own.held = load_held(threadIdx.x);
    a.template load_rows<!kWide>();
    set.clear();
    fill_slot_of(kNone);
    lru.clear_flags();
    if (threadIdx.x == 0) *has_duplicates = 0;
    if constexpr (!kTile) {
      // Four packs under way at a time.
      constexpr uint32_t kBatch = kWide ? 1 : 4;
      if (threadIdx.x < slot_packs()) pack_at<kSlotPack>(lru.order, threadIdx.x) = own.order;
#pragma unroll 1
      for (uint32_t i = threadIdx.x + kThreads; i < slot_packs(); i += kBatch * kThreads) {
        Slots batch[kBatch];
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b) {
          if (i + b * kThreads < slot_packs()) batch[b] = load_order(i + b * kThreads);
        }
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b) {
          if (i + b * kThreads < slot_packs()) pack_at<kSlotPack>(lru.order, i + b * kThreads) = batch[b];
        }
      }
    }
  }

  // ---------------------------------------------------------------------------------------------- 2. columns and marks

  /// Columns -> ids, and into the set; own.id holds the first tokens. Returns whether any of this thread's is pending.
  /// The columns go in one round of the block after the other: several steps ask for much the same, and a column whose
  /// id an earlier round has brought knows its owner at once. Only equal ids in one round must be sorted out.
  __device__ __forceinline__ bool insert_columns(Own& own) const {
    bool pending = false;
    bool duplicate = false;
    uint32_t valid = 0;
    Columns next = own.id;
#pragma unroll 1
    for (uint32_t round = 0; round < column_packs(); round += kThreads) {
      const uint32_t i = round + threadIdx.x;
      const bool inside = i < column_packs();
      Columns id;
      uint32_t at[kColumnPack];
      uint32_t known = 0;
      if (inside) {
        const Columns token = next;
        if (!kTile && i + kThreads < column_packs()) next = a.tokens(i + kThreads);
        valid += a.locate(i * kColumnPack, token.x, id.x, mine());
#pragma unroll
        for (uint32_t j = 0; j < kColumnPack; ++j) pending |= id.x[j] >= 0;
        known = set.insert(id.x, i * kColumnPack, at);
      }
      if constexpr (kTile) {
        own.id = id;
        duplicate = known != 0;
        break;
      } else {
        __syncthreads();
#pragma unroll
        for (uint32_t j = 0; j < kColumnPack; ++j) {
          if (!(known >> j & 1)) continue;
          const uint32_t owner = set.columns[at[j]];
          if (owner >= round * kColumnPack) duplicate = true;
          if (owner < round * kColumnPack) id.x[j] = -2 - static_cast<int32_t>(owner);
        }
        if (inside) pack_at<kColumnPack>(ids, i) = id;
      }
    }
    a.count_valid(valid);
    if (duplicate) atomicOr(has_duplicates, 1u);
    return pending;
  }

  __device__ __forceinline__ void mark_named_slots(const Own& own) const {
    for_packs(slot_packs(), [&](uint32_t i) {
      const Slots slot = order_pack(own, i);
#pragma unroll
      for (uint32_t j = 0; j < kSlotPack; ++j) {
        if (slot.x[j] < a.slots()) lru.flags[slot.x[j]] = 1;
      }
    });
  }

  /// The first column that names an id owns it; the others point to it.
  __device__ __forceinline__ void resolve_duplicates(Own& own) const {
    for_packs(column_packs(), [&](uint32_t i) {
      const Columns id = id_pack(own, i);
#pragma unroll
      for (uint32_t j = 0; j < kColumnPack; ++j) {
        if (id.x[j] >= 0) atomic_min(set.place_of(id.x[j]), i * kColumnPack + j);
      }
    });
    __syncthreads();
    for_packs(column_packs(), [&](uint32_t i) {
      Columns id = id_pack(own, i);
#pragma unroll
      for (uint32_t j = 0; j < kColumnPack; ++j) {
        if (id.x[j] < 0) continue;
        const uint32_t owner = *set.place_of(id.x[j]);
        if (owner != i * kColumnPack + j) id.x[j] = -2 - static_cast<int32_t>(owner);
      }
      if constexpr (kTile) {
        own.id = id;
      } else {
        pack_at<kColumnPack>(ids, i) = id;
      }
    });
    if constexpr (!kTile) {
      // Who pointed to a column of an earlier round may point to one that was no owner.
      __syncthreads();
#pragma unroll 1
      for (uint32_t q = threadIdx.x; q < a.columns(); q += kThreads) {
        if (ids[q] < -1 && ids[-2 - ids[q]] < -1) ids[q] = ids[-2 - ids[q]];
      }
      __syncthreads();
    }
  }

  // ---------------------------------------------------------------------------------------------------------- 3. slots

  /// Slots -> hits, in the place of the marks. Returns whether one of this thread's slots had no mark.
  __device__ __forceinline__ bool mark_hits(const Own& own) const {
    bool missing = false;
    Held next = own.held;
    for_packs(slot_packs(), [&](uint32_t i) {
      const Held held = next;
      if (!kTile && i + kThreads < slot_packs()) next = load_held(i + kThreads);
      missing |= lru.marks(i) != lru.all_marks(i);
      uint32_t column[kSlotPack];
      set.find(held.x, column);
      uint32_t hits = 0;
#pragma unroll
      for (uint32_t j = 0; j < kSlotPack; ++j) {
        if (column[j] == HotSet<Index>::kNone) continue;
        slot_of[column[j]] = static_cast<Index>(i * kSlotPack + j);
        hits |= 1u << 8 * j;
      }
      lru.marks(i) = hits;
    });
    return missing;
  }

  // --------------------------------------------------------------------------------------------------- 4. numbers

  /// Numbers of hits by position and misses by column; sums of columns that are pending and of those that are hit.
  __device__ __forceinline__ Scanned<Word> count(Own& own) const {
    uint32_t hits = 0;
    uint32_t misses = 0;
    uint32_t pending = 0;
    uint32_t found = 0;
    for_own_packs(slot_packs(), [&](uint32_t i) {
      own.hits = hits_of(order_pack(own, i));
      hits += __popc(own.hits);
    });
    for_own_packs(column_packs(), [&](uint32_t i) {
      const Columns id = id_pack(own, i);
      const Pack<Index, kColumnPack> at = pack_at<kColumnPack>(slot_of, i);
#pragma unroll
      for (uint32_t j = 0; j < kColumnPack; ++j) {
        pending += id.x[j] != -1;
        if (id.x[j] < 0) continue;
        found += at.x[j] != kNone;
        if (at.x[j] != kNone) continue;
        if (a.source(id.x[j], own.source[j])) {
          ++misses;
        } else {
          slot_of[i * kColumnPack + j] = kNowhere;
        }
      }
    });
    return block_scan<kThreads>(Pair<Word>::of(hits, misses), Pair<Word>::of(pending, found), *totals);
  }

  /// Corrupt state: the LRU becomes a permutation, and of an id's copies the most recently used one is the hit.
  __device__ __forceinline__ void repair(Own& own, bool corrupt) const {
    if constexpr (kTile) {
      if (threadIdx.x < slot_packs()) pack_at<kSlotPack>(lru.order, threadIdx.x) = own.order;
      __syncthreads();
    }
    if (corrupt) {
      lru.repair(*totals);
    } else {
      lru.invert();
    }
    lru.clear_flags();
    fill_slot_of(0);
    __syncthreads();
    for_packs(slot_packs(), [&](uint32_t i) {
      const Held held = kTile ? own.held : load_held(i);
      uint32_t column[kSlotPack];
      set.find(held.x, column);
#pragma unroll
      for (uint32_t j = 0; j < kSlotPack; ++j) {
        if (column[j] == HotSet<Index>::kNone) continue;
        atomic_max(slot_of + column[j], lru.position_of[i * kSlotPack + j] + 1u);
      }
    });
    __syncthreads();
    for_packs(column_packs(), [&](uint32_t i) {
#pragma unroll 1
      for (uint32_t q = i * kColumnPack; q < (i + 1) * kColumnPack; ++q) {
        const uint32_t after = slot_of[q];
        const uint32_t slot = after == 0 ? 0 : lru.order[after - 1];
        if (after != 0) lru.flags[slot] = 1;
        slot_of[q] = after == 0 ? kNone : static_cast<Index>(slot);
      }
    });
    if constexpr (kTile) {
      if (threadIdx.x < slot_packs()) own.order = pack_at<kSlotPack>(lru.order, threadIdx.x);
    }
    __syncthreads();
  }

  /// The new order, and the victims that take misses.
  __device__ __forceinline__ void partition(const Own& own, const Partition& target, uint32_t hits_before) const {
    for_own_packs(slot_packs(), [&](uint32_t i) {
      const Slots slot = order_pack(own, i);
      const uint32_t hits = kTile ? own.hits : hits_of(slot);
#pragma unroll
      for (uint32_t j = 0; j < kSlotPack; ++j) {
        const uint32_t p = i * kSlotPack + j;
        if (p >= a.slots()) break;
        const bool hit = hits >> j & 1;
        const uint32_t v = p - hits_before;
        new_order[hit ? target.of_hit(hits_before) : target.of_victim(v)] = slot.x[j];
        if (!hit && v < target.loads) victims[v] = slot.x[j];
        hits_before += hit;
      }
    });
  }

  /// Numbers the misses that are copied: m and on are this thread's.
  __device__ __forceinline__ void number_misses(Own& own, uint32_t m, uint32_t copies) const {
    for_own_packs(column_packs(), [&](uint32_t i) {
      const Columns id = id_pack(own, i);
      const Pack<Index, kColumnPack> at = pack_at<kColumnPack>(slot_of, i);
#pragma unroll
      for (uint32_t j = 0; j < kColumnPack; ++j) {
        if (id.x[j] < 0 || at.x[j] != kNone) continue;
        if (m < copies) {
          if (!kTile) a.source(id.x[j], own.source[j]);
          slot_of[i * kColumnPack + j] = static_cast<Index>(kMissed | m);
          sources[m] = own.source[j];
        }
        ++m;
      }
    });
  }

  // --------------------------------------------------------------------------------------------------- 5. results

  /// The device row of miss m.
  __device__ __forceinline__ int32_t row_of_miss(uint32_t m, uint32_t loads) const {
    if constexpr (Addressing::kSpare) {
      if (m >= loads) return a.spare_row(m - loads);
    }
    return a.row_of_slot(victims[m]);
  }

  /// Rows of pending columns, and with those that own a miss its copy and the slot's new id.
  __device__ __forceinline__ void write_columns(const Own& own, uint32_t loads) const {
    for_packs(column_packs(), [&](uint32_t i) {
      const Columns id = id_pack(own, i);
      Pack<Index, kColumnPack> at = pack_at<kColumnPack>(slot_of, i);
      Columns row;
      uint32_t pending = 0;  // a bit per column
      uint32_t copied = 0;
#pragma unroll
      for (uint32_t j = 0; j < kColumnPack; ++j) {
        if (id.x[j] < -1) [[unlikely]]
          at.x[j] = slot_of[-2 - id.x[j]];
        if (id.x[j] == -1) at.x[j] = kNone;
        pending |= static_cast<uint32_t>(id.x[j] != -1) << j;
        row.x[j] = at.x[j] < kMissed ? a.row_of_slot(at.x[j]) : -1;
        if (at.x[j] < kMissed || at.x[j] >= kNowhere) continue;
        const uint32_t m = at.x[j] & static_cast<Index>(~kMissed);
        row.x[j] = row_of_miss(m, loads);
        if (id.x[j] < 0) continue;
        copied |= static_cast<uint32_t>(row.x[j] >= 0) << j;
        if (m < loads) a.held()[victims[m]] = row.x[j] >= 0 ? id.x[j] : -1;
        a.write_miss(m, id.x[j], sources[m], row.x[j], i * kColumnPack + j);
      }
      a.write_columns(i * kColumnPack, row.x, pending, copied);
    });
  }

  __device__ __forceinline__ void write_lru() const {
    LruSlot* const to = a.lru();
    for_packs(slot_packs(), [&](uint32_t i) {
      const Slots slot = pack_at<kSlotPack>(new_order, i);
      Pack<LruSlot, kSlotPack> pack;
#pragma unroll
      for (uint32_t j = 0; j < kSlotPack; ++j) pack.x[j] = static_cast<LruSlot>(slot.x[j]);
      store_pack(to, i, a.slots(), launch.vector_lru, pack);
    });
  }

  /// The copies of this block, for Addressing::copy: every blocks()-th miss, as they come or as `sorted` says.
  struct Copies {
    const Resolver& r;
    uint32_t loads;
    bool sorted;

    __device__ __forceinline__ auto at(uint32_t n) const {
      const uint32_t m = sorted ? r.slot_of[n] : n * r.blocks() + r.rank;
      return r.a.copy_of(r.sources[m], r.row_of_miss(m, loads));
    }
  };

  /// Misses of this block by where they lie in host memory, in the place of slot_of. Requests that are resolved side by
  /// side then read from the same part of the pool at a time, and the GPU's address translation, which holds only a
  /// part of it, finds more of what it needs.
  __device__ __forceinline__ void sort_copies(uint32_t count) const {
    constexpr uint32_t kBuckets = 4 * kWarp;
    auto* const place = reinterpret_cast<uint32_t*>(totals);  // [kBuckets]
    static_assert(sizeof(WarpTotals<uint64_t>) >= kBuckets * sizeof(uint32_t));
    const float share = kBuckets / static_cast<float>(a.host_rows());
    const auto bucket_of = [&](uint32_t m) {
      return min(kBuckets - 1, static_cast<uint32_t>(static_cast<float>(sources[m]) * share));
    };
    if (threadIdx.x < kBuckets) place[threadIdx.x] = 0;
    __syncthreads();  // nobody asks slot_of any more, either
#pragma unroll 1
    for (uint32_t n = threadIdx.x; n < count; n += kThreads) atomicAdd(place + bucket_of(n * blocks() + rank), 1u);
    __syncthreads();
    if (threadIdx.x < kWarp) {
      uint32_t size[4];
      uint32_t own = 0;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) own += size[i] = place[threadIdx.x * 4 + i];
      uint32_t next = warp_scan(own, threadIdx.x) - own;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        place[threadIdx.x * 4 + i] = next;
        next += size[i];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t n = threadIdx.x; n < count; n += kThreads) {
      const uint32_t m = n * blocks() + rank;
      slot_of[atomicAdd(place + bucket_of(m), 1u)] = static_cast<Index>(m);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void resolve() const {
    Own own;
    start(own);
    async_wait();  // what load_rows has asked for
    __syncthreads();
    const bool pending = insert_columns(own);
    mark_named_slots(own);
    if (!__syncthreads_or(pending)) {
      a.write_counts(rank, blocks(), 0);
      return;
    }
    if (*has_duplicates) [[unlikely]]
      resolve_duplicates(own);

    const bool corrupt = __syncthreads_or(mark_hits(own));
    // Where the slots that are hit are not as many as the ids found in them, an id has several slots.
    Scanned<Word> scanned;
#pragma unroll 1
    for (bool repaired = false;; repaired = true) {
      scanned = count(own);
      if (repaired || (!corrupt && scanned.total.first() == scanned.sum.second())) [[likely]]
        break;
      repair(own, corrupt);
    }
    if (launch.cluster_log2 != 0) cluster_arrive();  // this block has read the state
    const uint32_t hits = scanned.total.first();
    const uint32_t misses = scanned.total.second();
    const Partition target{a.slots(), hits, min(misses, a.slots() - hits)};
    uint32_t copies = target.loads;
    if constexpr (Addressing::kSpare) copies = min(misses, copies + a.spare());
    partition(own, target, scanned.before.first());
    number_misses(own, scanned.before.second(), copies);
    __syncthreads();
    if (launch.cluster_log2 != 0) cluster_wait();

    if (mine()) {
      write_columns(own, target.loads);
      write_lru();
    }
    a.write_counts(rank, blocks(), copies);
    a.add_stats(rank, scanned.sum.first() - misses, misses);
    if (launch.copy && copies > rank) {
      const uint32_t count = (copies - rank - 1) / blocks() + 1;
      const bool sorted = !kWide && count >= kSortedCopies && gridDim.x >= kSortedBlocks;
      if (sorted) sort_copies(count);
      a.copy(Copies{*this, target.loads, sorted}, count, threadIdx.x / kWarp, kThreads / kWarp);
    }
  }
};

}  // namespace hotplan::hisparse
