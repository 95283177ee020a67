/// \file divided.cuh
/// \brief The resolution of one set, divided among the blocks of a cluster: resolver.cuh's steps and results.
///
/// A block has a run of columns, a run of slots, the LRU positions of the same numbers, and a part of the hash table.
/// What concerns another's part is read from and written to its shared memory. So every block has an eighth of the
/// instructions, which are what bounds resolver.cuh, but waits for the network between the SMs: some three cycles for
/// each access of a lane, and 800 for each of four barriers (NOTES.md). That pays for sets of more than a tile.
///
/// 1. Columns put their ids into the table; positions mark the slots that they name.
/// 2. Slots look their ids up: hits go to their columns, and as bits to every block.
/// 3. Each block counts its hits along the LRU and its misses along the columns, and tells the others.
/// 4. Everything has its place, as in resolver.cuh. Victims and sources of misses go to the block that copies them.
/// 5. Columns get their rows and the LRU its new order.
///
/// Nothing is written before step 3 is over, apart from columns that need no look-up. If a block finds the state
/// corrupt there, all resolve the set with resolver.cuh from the beginning.
#pragma once

#include <hotplan/hisparse/hash.h>
#include <hotplan/hisparse/layout.h>
#include <hotplan/hisparse/lru.cuh>
#include <hotplan/hisparse/miss_copies.cuh>
#include <hotplan/hisparse/resolver.cuh>

namespace hotplan::hisparse {

/// A hash table in the shared memory of a cluster: buckets of two entries, which a look-up reads at once. An id is in
/// the first bucket of its sequence that had room, so a look-up ends where there is room.
struct DividedTable {
  /// An id, and the first column that names it.
  using Entry = unsigned long long;
  using Bucket = Pack<Entry, 2>;
  static constexpr Entry kEmpty = ~Entry{0};  // the id of this is -1, which is none
  static constexpr uint32_t kNone = 0xFFFFFFFFu;

  Entry* entries;  // of this block
  uint32_t blocks_log2;
  uint32_t entries_log2;  // of a block

  __device__ __forceinline__ static Entry entry_of(int32_t id, uint32_t column) {
    return static_cast<Entry>(static_cast<uint32_t>(id)) << 32 | column;
  }
  __device__ __forceinline__ static int32_t id_of(Entry entry) {
    return static_cast<int32_t>(entry >> 32);
  }
  __device__ __forceinline__ static uint32_t column_of(Entry entry) {
    return static_cast<uint32_t>(entry);
  }

  __device__ __forceinline__ uint32_t buckets_log2() const {
    return blocks_log2 + entries_log2 - 1;
  }
  __device__ __forceinline__ Bucket* bucket_at(uint32_t bucket) const {
    const uint32_t own = bucket & ((1u << (entries_log2 - 1)) - 1);
    return in_block(reinterpret_cast<Bucket*>(entries) + own, bucket >> (entries_log2 - 1));
  }
  __device__ __forceinline__ uint32_t first_of(int32_t id) const {
    return home_of(id, 1u << buckets_log2());
  }
  /// Odd distances reach every bucket of a table whose size is a power of two.
  __device__ __forceinline__ uint32_t next(uint32_t bucket, int32_t id) const {
    return (bucket + (static_cast<uint32_t>(id) * kHashFactor >> 7 | 1)) & ((1u << buckets_log2()) - 1);
  }

  __device__ __forceinline__ void clear() const {
#pragma unroll 2
    for (uint32_t i = threadIdx.x; i < 1u << (entries_log2 - 1); i += kResolveThreads) {
      pack_at<2>(entries, i) = {{kEmpty, kEmpty}};
    }
  }

  /// Where an id is, for column_at.
  __device__ __forceinline__ uint32_t insert(int32_t id, uint32_t column) const {
    const Entry wanted = entry_of(id, column);
    for (uint32_t at = first_of(id);; at = next(at, id)) {
      Entry* const bucket = bucket_at(at)->x;
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        Entry* const entry = bucket + ((id ^ j) & 1);
        Entry old = atomicCAS(entry, kEmpty, wanted);
        if (old == kEmpty) return at * 2 + ((id ^ j) & 1);
        if (id_of(old) != id) continue;
        while (column_of(old) > column) {
          const Entry seen = old;
          old = atomicCAS(entry, seen, wanted);
          if (old == seen) break;
        }
        return at * 2 + ((id ^ j) & 1);
      }
    }
  }

  /// The first column that brought the id; behind the next barrier of the cluster.
  __device__ __forceinline__ uint32_t column_at(uint32_t place) const {
    return column_of(bucket_at(place / 2)->x[place % 2]);
  }

  /// For N numbers, which may be no ids at all, the columns or kNone.
  template <int N>
  __device__ __forceinline__ void find(const int32_t (&id)[N], uint32_t (&column)[N]) const {
    uint32_t at[N];
    Bucket seen[N];
    uint32_t more = 0;  // a bit per number
#pragma unroll
    for (int j = 0; j < N; ++j) {
      at[j] = first_of(id[j]);
      column[j] = kNone;
      if (id[j] >= 0) seen[j] = *bucket_at(at[j]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (id[j] >= 0) more |= static_cast<uint32_t>(!ends(seen[j], id[j], column[j])) << j;
    }
    while (more != 0) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (!(more >> j & 1)) continue;
        at[j] = next(at[j], id[j]);
        seen[j] = *bucket_at(at[j]);
        if (ends(seen[j], id[j], column[j])) more &= ~(1u << j);
      }
    }
  }

 private:
  /// Whether a look-up ends with this bucket; `column` is what it has found.
  __device__ __forceinline__ static bool ends(const Bucket& seen, int32_t id, uint32_t& column) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (id_of(seen.x[i]) == id) column = column_of(seen.x[i]);
    }
    return column != kNone || seen.x[0] == kEmpty || seen.x[1] == kEmpty;
  }
};

/// What a block tells the others: four counts of 16 bits, of which the third has a bit to spare.
struct Share {
  static constexpr uint32_t kCorrupt = 1u << 31;

  uint32_t scanned;  // Pair: hits, misses
  uint32_t summed;   // Pair: pending columns, columns that are hit; kCorrupt
};

template <typename Addressing>
struct DividedResolver {
  using Word = uint32_t;
  using LruSlot = typename Addressing::LruSlot;
  using Source = typename Addressing::Source;
  using Slots = Pack<uint16_t, kDividedSlots>;
  using Held = Pack<int32_t, kDividedSlots>;
  static_assert(kDividedColumns == 1 && kDividedSlots == 2);

  // What stands in slot_of: a slot that is hit, a miss's number with a mark, none, or that the column is to have none.
  static constexpr int32_t kNone = -1;
  static constexpr int32_t kNowhere = -2;
  static constexpr int32_t kMissed = 1 << 30;

  const Addressing& a;
  const SetLaunch& launch;
  const DividedLayout& l;
  uint32_t rank;  // of the block among those of its cluster
  DividedTable table;
  int32_t* slot_of;
  uint32_t* named;
  uint32_t* inbox;
  uint32_t* hits;
  Source* sources;
  uint16_t* victims;
  WarpTotals<Word>* totals;
  uint32_t* corrupt;  // whether a slot of this block had no mark
  Share* shares;

  __device__ __forceinline__
  DividedResolver(const Addressing& addressing, const SetLaunch& how, char* memory, uint32_t cluster_rank)
      : a(addressing), launch(how), l(how.division), rank(cluster_rank) {
    table = {reinterpret_cast<DividedTable::Entry*>(memory + l.entries), how.cluster_log2, l.entries_log2};
    slot_of = reinterpret_cast<int32_t*>(memory + l.slot_of);
    named = reinterpret_cast<uint32_t*>(memory + l.named);
    inbox = reinterpret_cast<uint32_t*>(memory + l.inbox);
    hits = reinterpret_cast<uint32_t*>(memory + l.hits);
    sources = reinterpret_cast<Source*>(memory + l.sources);
    victims = reinterpret_cast<uint16_t*>(memory + l.victims);
    totals = reinterpret_cast<WarpTotals<Word>*>(memory + l.totals);
    corrupt = reinterpret_cast<uint32_t*>(memory + l.totals + sizeof(WarpTotals<uint64_t>));
    shares = reinterpret_cast<Share*>(memory + l.shares);
  }

  __device__ __forceinline__ uint32_t blocks() const {
    return 1u << launch.cluster_log2;
  }

  // Slots and positions are the first threads' business, columns the last ones': other warps', where there are enough.
  __device__ __forceinline__ uint32_t pack() const {
    return (rank << l.slots_log2) / kDividedSlots + threadIdx.x;
  }
  __device__ __forceinline__ uint32_t first_slot() const {
    return pack() * kDividedSlots;
  }
  __device__ __forceinline__ bool has_slots() const {
    return threadIdx.x < (1u << l.slots_log2) / kDividedSlots && first_slot() < a.slots();
  }
  __device__ __forceinline__ uint32_t own_column() const {
    return threadIdx.x - (kResolveThreads - (1u << l.columns_log2));
  }
  __device__ __forceinline__ uint32_t column() const {
    return (rank << l.columns_log2) + own_column();
  }
  /// For whole warps.
  __device__ __forceinline__ bool may_have_column() const {
    return threadIdx.x >= kResolveThreads - (1u << l.columns_log2);
  }

  /// Words of a bit for each of a block's slots.
  __device__ __forceinline__ uint32_t slot_words() const {
    return 1u << (l.slots_log2 - 5);
  }

  __device__ __forceinline__ int32_t* slot_of_column(uint32_t q) const {
    return in_block(slot_of + (q & ((1u << l.columns_log2) - 1)), q >> l.columns_log2);
  }
  /// Bits of 64 neighbouring slots are two words, those of even and of odd ones.
  __device__ __forceinline__ bool is_hit(uint32_t slot) const {
    return hits[slot / 64 * 2 + slot % 2] >> (slot % 64 / 2) & 1;
  }

  /// A thread's own elements.
  struct Own {
    Slots order;
    Held held;
    int32_t id = -1;  // of its column: an owner's id, -1, or -2 - owner for another column with its id
    Source source{};
    uint32_t hits = 0;  // a bit per slot of `order`
    int32_t at = kNone;
    bool misses = false;
  };

  // --------------------------------------------------------------------------------------------------------- steps

  /// Asks for everything that is needed from global memory. Returns the token of the column.
  __device__ __forceinline__ Pack<int32_t, 1> start(Own& own) const {
    if (has_slots()) {
      const auto from = load_pack<kDividedSlots>(a.lru(), pack(), a.slots(), launch.vector_lru);
      own.held = load_pack<kDividedSlots>(a.held(), pack(), a.slots(), launch.vector_held);
#pragma unroll
      for (uint32_t j = 0; j < kDividedSlots; ++j) own.order.x[j] = Lru::checked(from.x[j]);
    }
    Pack<int32_t, 1> token{{-1}};
    if (may_have_column() && column() < a.columns()) token = a.template tokens<1>(column());
    a.template load_rows<true>();
    table.clear();
    if (may_have_column()) slot_of[own_column()] = kNone;
    if (threadIdx.x < slot_words() << launch.cluster_log2) named[threadIdx.x] = 0;
    if (threadIdx.x == 0) *corrupt = 0;
    return token;
  }

  /// 1. Returns the id's place in the table, which says later whether another column owns it, or kNone.
  __device__ __forceinline__ uint32_t insert(Own& own, const Pack<int32_t, 1>& token) const {
    uint32_t entry = DividedTable::kNone;
    if (may_have_column()) {
      int32_t id[1];
      a.count_valid(a.template locate<1>(column(), token.x, id, true));
      own.id = id[0];
      if (own.id >= 0) {
        own.source = a.load_source(own.id);
        entry = table.insert(own.id, column());
      }
    }
    if (has_slots()) {
#pragma unroll
      for (uint32_t j = 0; j < kDividedSlots; ++j) {
        const uint32_t slot = own.order.x[j];
        if (slot < a.slots()) atomicOr(named + slot / 32, 1u << slot % 32);
      }
    }
    __syncthreads();
    // One after the other, the words for a block are one access of the network.
    if (threadIdx.x < slot_words() << launch.cluster_log2) {
      const uint32_t block = threadIdx.x >> (l.slots_log2 - 5);
      const uint32_t word = threadIdx.x & (slot_words() - 1);
      in_block(inbox, block)[rank * slot_words() + word] = named[threadIdx.x];
    }
    return entry;
  }

  /// 2. Slots that are hit, and the owner of the column's id.
  __device__ __forceinline__ void find_hits(Own& own, uint32_t entry) const {
    if (entry != DividedTable::kNone) {
      const uint32_t owner = table.column_at(entry);
      if (owner != column()) own.id = -2 - static_cast<int32_t>(owner);
    }
    if (threadIdx.x >= (1u << l.slots_log2) / kDividedSlots) return;
    uint32_t found[kDividedSlots] = {DividedTable::kNone, DividedTable::kNone};
    if (has_slots()) {
      table.find(own.held.x, found);
#pragma unroll
      for (uint32_t j = 0; j < kDividedSlots; ++j) {
        const uint32_t slot = first_slot() + j;
        if (found[j] != DividedTable::kNone && slot < a.slots()) {
          *slot_of_column(found[j]) = static_cast<int32_t>(slot);
        }
      }
    }
    const uint32_t lane = threadIdx.x % kWarp;
    Pack<uint32_t, kDividedSlots> bits;
#pragma unroll
    for (uint32_t j = 0; j < kDividedSlots; ++j) {
      bits.x[j] = __ballot_sync(kFullMask, found[j] != DividedTable::kNone);
    }
    if (lane < blocks()) pack_at<kDividedSlots>(in_block(hits, lane), pack() / kWarp) = bits;
    // The 64 slots of this warp: is there one that no position names?
    Pack<uint32_t, 2> names{};
    if (lane < blocks()) names = pack_at<2>(inbox + lane * slot_words(), threadIdx.x / kWarp);
    const uint32_t first = pack() / kWarp * 64;
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const uint32_t from = first + 32 * j;
      const uint32_t count = from < a.slots() ? min(a.slots() - from, 32u) : 0;
      const uint32_t all = count == 32 ? kFullMask : (1u << count) - 1;
      if ((__reduce_or_sync(kFullMask, names.x[j]) & all) != all) [[unlikely]]
        *corrupt = 1;
    }
  }

  /// 3. Numbers within the block, which the others learn.
  __device__ __forceinline__ Scanned<Word> count(Own& own) const {
    if (has_slots()) {
#pragma unroll
      for (uint32_t j = 0; j < kDividedSlots; ++j) {
        if (own.order.x[j] < a.slots()) own.hits |= static_cast<uint32_t>(is_hit(own.order.x[j])) << j;
      }
    }
    if (own.id >= 0) own.at = slot_of[own_column()];
    const bool found = own.at != kNone;
    own.misses = own.id >= 0 && !found && a.is_source(own.source);
    if (own.id >= 0 && !found && !own.misses) slot_of[own_column()] = own.at = kNowhere;
    const auto numbers = Pair<Word>::of(__popc(own.hits), own.misses);
    const auto scanned = block_scan<kResolveThreads>(numbers, Pair<Word>::of(own.id != -1, found), *totals);
    if (threadIdx.x < blocks()) {
      const uint32_t flag = *corrupt != 0 ? Share::kCorrupt : 0;
      in_block(shares, threadIdx.x)[rank] = {scanned.total.word, scanned.sum.word | flag};
    }
    return scanned;
  }

  /// Sums over the blocks.
  struct Sums {
    Pair<Word> before;  // of hits and misses, over the blocks before this one
    Pair<Word> total;
    Pair<Word> sum;  // of pending columns and of those that are hit
    bool corrupt;
  };

  __device__ __forceinline__ Sums sum_shares() const {
    const uint32_t lane = threadIdx.x % kWarp;
    const Share share = lane < blocks() ? shares[lane] : Share{0, 0};
    Sums s;
    s.before.word = warp_sum(lane < rank ? share.scanned : 0);
    s.total.word = warp_sum(share.scanned);
    s.sum.word = warp_sum(share.summed & ~Share::kCorrupt);
    s.corrupt = __any_sync(kFullMask, (share.summed & Share::kCorrupt) != 0);
    return s;
  }

  /// 4. Where the positions' slots go in the new order; victims and sources to the blocks that copy.
  __device__ __forceinline__ void place(
      Own& own, const Partition& target, uint32_t hits_before, uint32_t m, uint32_t copies,
      uint32_t (&to)[kDividedSlots]) const {
    const uint32_t block_mask = blocks() - 1;
    if (has_slots()) {
#pragma unroll
      for (uint32_t j = 0; j < kDividedSlots; ++j) {
        const bool hit = own.hits >> j & 1;
        const uint32_t v = first_slot() + j - hits_before;
        to[j] = hit ? target.of_hit(hits_before) : target.of_victim(v);
        if (!hit && v < target.loads) in_block(victims, v & block_mask)[v >> launch.cluster_log2] = own.order.x[j];
        hits_before += hit;
      }
    }
    if (own.misses && m < copies) {
      slot_of[own_column()] = own.at = static_cast<int32_t>(kMissed | m);
      in_block(sources, m & block_mask)[m >> launch.cluster_log2] = own.source;
    }
  }

  /// 5. The row of the column, and with one that owns a miss its copy and the slot's new id.
  __device__ __forceinline__ void write_column(const Own& own, uint32_t loads) const {
    if (own.id == -1) return;
    const int32_t at = own.id < -1 ? *slot_of_column(-2 - own.id) : own.at;
    int32_t row[1] = {at >= 0 && at < kMissed ? a.row_of_slot(at) : -1};
    bool copied = false;
    if (at >= kMissed) {
      const uint32_t m = at & ~kMissed;
      uint16_t victim = 0;
      if (m < loads) victim = in_block(victims, m & (blocks() - 1))[m >> launch.cluster_log2];
      row[0] = row_of_miss(a, m, loads, &victim);
      if (own.id >= 0) {
        copied = row[0] >= 0;
        if (m < loads) a.held()[victim] = copied ? own.id : -1;
        a.write_miss(m, own.id, own.source, row[0], column());
      }
    }
    a.template write_columns<1>(column(), row, 1, copied);
  }

  /// Returns false where the state is corrupt, and has changed nothing then. Before the block ends it has to wait for
  /// the cluster, since others may still read what it has.
  __device__ __forceinline__ bool resolve(MissCopies<Source, Span::kLoop>& list) const {
    Own own;
    const auto token = start(own);
    async_wait();  // what load_rows has asked for
    cluster_arrive_release();
    cluster_wait();
    const uint32_t entry = insert(own, token);
    cluster_arrive_release();
    cluster_wait();
    find_hits(own, entry);
    cluster_arrive_release();
    cluster_wait();
    const Scanned<Word> scanned = count(own);
    cluster_arrive_release();
    cluster_wait();

    const Sums s = sum_shares();
    const uint32_t hits_total = s.total.first();
    const uint32_t misses = s.total.second();
    if (s.sum.first() == 0) {
      a.write_counts(rank, blocks(), 0);
      cluster_arrive();
      return true;
    }
    // Where the slots that are hit are not as many as the ids found in them, an id has several slots.
    if (s.corrupt || hits_total != s.sum.second()) [[unlikely]] {
      __syncthreads();  // nobody asks what is here any more
      return false;
    }
    const Partition target{a.slots(), hits_total, min(misses, a.slots() - hits_total)};
    const uint32_t copies = copied_misses(a, misses, target.loads);
    uint32_t to[kDividedSlots];
    place(
        own, target, s.before.first() + scanned.before.first(), s.before.second() + scanned.before.second(), copies,
        to);
    cluster_arrive_release();
    cluster_wait();

    if (may_have_column()) write_column(own, target.loads);
    cluster_arrive();  // this block has read what others have
    if (has_slots()) {
#pragma unroll
      for (uint32_t j = 0; j < kDividedSlots; ++j) {
        if (first_slot() + j < a.slots()) a.lru()[to[j]] = static_cast<LruSlot>(own.order.x[j]);
      }
    }
    a.write_counts(rank, blocks(), copies);
    a.add_stats(rank, s.sum.first() - misses, misses);
    list.set(copies, target.loads);
    return true;
  }
};

/// Resolves a set, and copies what that asks for.
template <Span kSpan, typename Addressing>
__device__ __forceinline__ void resolve_set(const Addressing& addressing, const SetLaunch& launch) {
  char* const memory = memory_of_block<kSpan>(launch);
  const uint32_t rank = rank_of_block(launch);
  MissCopies<typename Addressing::Source, kSpan> copies{launch, memory};
  if constexpr (decltype(copies)::kMayBeDivided) {
    if (launch.divided) {
      const Addressing shared = addressing.divided();
      copies.divided = DividedResolver<Addressing>(shared, launch, memory, rank).resolve(copies);
    }
  }
  if (!copies.divided) Resolver<Addressing, kSpan>(addressing, launch, memory, rank).resolve(copies);
  if (launch.copy) copy_misses(addressing, copies);
  if (copies.divided) cluster_wait();
}

}  // namespace hotplan::hisparse
