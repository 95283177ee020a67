/// \file prefill.cuh
/// \brief The prefill kernel: an exclusive scan over requests, then independent rows.
///
/// How many rows a request has is closed form (rules.h). So a block scans the row counts of the batch, finds for each
/// of its rows the request that owns it, and builds the row from (request, k): no atomics, no walk over tokens, one
/// order. Every block repeats the scan. That costs a read of the lengths from L2; handing the result from block to
/// block would cost a second launch, or a spin.
///
/// blockIdx.y is the output. Its rows go to the blocks in chunks of a warp, round robin: the plan's own rows come first
/// and the cheap invalid ones last, and each block gets its share of both.
#pragma once

#include <hotplan/compress/lengths.cuh>
#include <hotplan/warp.cuh>

namespace hotplan::compress {

inline constexpr uint32_t kMaxThreads = 1024;

/// A batch larger than a block is scanned by buckets of up to 16 requests, and a row walks its bucket.
inline constexpr uint32_t kMaxBuckets = 4096;

/// Where bucket b lies in shared memory. A thread scans up to 4 neighbours; one unused place behind every 4 spreads the
/// threads of a warp over the banks, which took 0.9 of 10.4 us for 4096 requests.
__device__ __forceinline__ uint32_t padded(uint32_t b) {
  return b + b / 4;
}
/// The blocks that share the sums of a large batch's buckets through each other's shared memory (sm_90 on).
inline constexpr uint32_t kCluster = 8;

/// What a launch adds to the params: which requests and rows it is about.
struct PrefillRange {
  uint32_t first;  // the requests are [first, first + batch)
  uint32_t batch;
  uint32_t ragged_begin;            // ragged id of the first one's first token
  uint32_t row_begin[kMaxOutputs];  // the rows of output o are [row_begin, row_end)
  uint32_t row_end[kMaxOutputs];
};

/// Rows and ragged ids of a run of requests.
struct Extent {
  uint32_t rows;
  uint32_t ids;
};

__device__ __forceinline__ Extent operator+(Extent a, Extent b) {
  return {a.rows + b.rows, a.ids + b.ids};
}

__device__ __forceinline__ Extent operator-(Extent a, Extent b) {
  return {a.rows - b.rows, a.ids - b.ids};
}

__device__ __forceinline__ Extent shuffle(Extent x, uint32_t lane) {
  return {__shfl_sync(kFullMask, x.rows, lane), __shfl_sync(kFullMask, x.ids, lane)};
}

/// Inclusive scan over the first `width` lanes of a warp.
__device__ __forceinline__ Extent warp_scan(Extent x, uint32_t lane, uint32_t width = kWarp) {
#pragma unroll
  for (uint32_t step = 1; step < kWarp; step *= 2) {
    if (step >= width) break;
    const Extent below{__shfl_up_sync(kFullMask, x.rows, step), __shfl_up_sync(kFullMask, x.ids, step)};
    if (lane >= step) x = x + below;
  }
  return x;
}

/// The batch as one output sees it.
template <typename Source>
struct BatchView {
  const PrefillParams& params;
  const PrefillOutput& out;
  const PrefillRange& range;
  const Source& lengths;

  __device__ __forceinline__ Extent extent_of(LengthPair length, Tokens& tokens) const {
    tokens = tokens_for(out, length.seq, length.extend, params.num_q_tokens);
    return {count_rows(out, tokens), ragged_ids(length.extend, params.num_q_tokens)};
  }
  __device__ __forceinline__ int64_t rid(uint32_t i) const {
    return params.rid[range.first + i];
  }
  __device__ __forceinline__ void store(
      uint32_t row, const Tokens& tokens, int64_t rid, uint32_t i, Extent start) const {
    const Request request{tokens, rid, range.first + i, start.ids};
    store_row(out, params.tables, params.num_q_tokens, request, row - start.rows, row);
  }
};

/// Calls `body(row)` for this warp's chunks of the rows of output blockIdx.y. All lanes of a warp are in every call; a
/// row past the end is `row_end` or more.
template <typename Body>
__device__ __forceinline__ void for_rows(const PrefillRange& range, uint32_t& row_end, Body&& body) {
  const uint32_t begin = range.row_begin[blockIdx.y];
  row_end = range.row_end[blockIdx.y];
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  const uint32_t stride = gridDim.x * blockDim.x;
  for (uint32_t row = begin + (warp * gridDim.x + blockIdx.x) * kWarp; row < row_end; row += stride) body(row + lane);
}

/// Batches of at most a warp: every warp scans for itself and finds owners by shuffles, without shared memory or
/// barriers.
template <typename Source>
__global__ void __launch_bounds__(256) prefill_small_kernel(
    const __grid_constant__ PrefillParams params, const __grid_constant__ PrefillRange range,
    const __grid_constant__ Source lengths) {
  const PrefillOutput out = in_registers(params.outputs[blockIdx.y]);
  const BatchView<Source> view{params, out, range, lengths};
  const uint32_t lane = threadIdx.x % kWarp;
  Tokens tokens{};
  Extent own{0, 0};
  int64_t rid = 0;
  if (lane < range.batch) {
    rid = view.rid(lane);
    own = view.extent_of(lengths[lane], tokens);
  }
  const Extent before{range.row_begin[blockIdx.y], range.ragged_begin};
  const Extent end = before + warp_scan(own, lane, range.batch);
  const Extent start = end - own;
  const uint32_t total = __shfl_sync(kFullMask, end.rows, range.batch - 1);
  uint32_t row_end;
  for_rows(range, row_end, [&](uint32_t row) {
    if (row - lane >= total) {  // the same for the whole warp, and for most warps
      if (row < row_end) store_invalid(out, row);
      return;
    }
    const uint32_t owner =
        last_not_behind(range.batch, row, [&](uint32_t k) { return __shfl_sync(kFullMask, start.rows, k); });
    const Tokens t{
        __shfl_sync(kFullMask, tokens.prefix, owner), __shfl_sync(kFullMask, tokens.begin, owner),
        __shfl_sync(kFullMask, tokens.end, owner), __shfl_sync(kFullMask, tokens.write_begin, owner),
        __shfl_sync(kFullMask, tokens.page_tails, owner)};
    const int64_t owner_rid = __shfl_sync(kFullMask, rid, owner);
    const Extent owner_start = shuffle(start, owner);
    if (row >= row_end) return;
    if (row < total) {
      view.store(row, t, owner_rid, owner, owner_start);
    } else {
      store_invalid(out, row);
    }
  });
}

/// A block's place in its cluster, and stores to the same address in the others' shared memory. A lone block is its own
/// cluster.
struct Cluster {
  uint32_t rank = 0;
  uint32_t size = 1;

  __device__ __forceinline__ Cluster() {
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
  }
  /// A barrier of all threads of the cluster, after which the blocks' shared memory exists.
  __device__ __forceinline__ void start() const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) {
      asm volatile("barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
    }
#endif
  }
  /// A barrier of all threads of the cluster, after which stores of before it are seen.
  __device__ __forceinline__ void sync() const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) {
      asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }
  __device__ __forceinline__ void store(Extent* mine, Extent value, uint32_t peer) const {
#if __CUDA_ARCH__ >= 900
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
    uint32_t theirs;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(peer));
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(theirs), "r"(value.rows), "r"(value.ids) : "memory");
#else
    *mine = value;
#endif
  }
};

/// Extents of all buckets into every block's `bucket`: each block of the cluster sums its share of the batch.
template <typename Source>
__device__ __forceinline__ void sum_buckets(const BatchView<Source>& view, uint32_t size_log2, Extent* bucket) {
  constexpr uint32_t kAhead = 4;  // loads in flight per thread
  const Cluster cluster;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t batch = view.range.batch;
  const uint32_t stride = blockDim.x * cluster.size;
  cluster.start();
  for (uint32_t base = cluster.rank * blockDim.x + threadIdx.x - lane; base < batch; base += kAhead * stride) {
    LengthPair length[kAhead];
#pragma unroll
    for (uint32_t k = 0; k < kAhead; ++k) {
      const uint32_t i = base + k * stride + lane;
      length[k] = i < batch ? view.lengths[i] : LengthPair{0, 0};
    }
#pragma unroll
    for (uint32_t k = 0; k < kAhead; ++k) {
      if (base + k * stride >= batch) break;  // the same for the whole warp
      Tokens unused;
      Extent sum = view.extent_of(length[k], unused);
      for (uint32_t step = 1; step >> size_log2 == 0; step *= 2) {
        sum = sum + Extent{__shfl_xor_sync(kFullMask, sum.rows, step), __shfl_xor_sync(kFullMask, sum.ids, step)};
      }
      // All lanes of a bucket hold its sum, and share telling it to the blocks.
      const uint32_t b = (base + k * stride + lane) >> size_log2;
      if (b << size_log2 < batch) {
        const uint32_t share = lane & ((1u << size_log2) - 1);
        for (uint32_t peer = share; peer < cluster.size; peer += 1u << size_log2)
          cluster.store(bucket + padded(b), sum, peer);
      }
    }
  }
  cluster.sync();
}

/// Exclusive scan over the threads of a block; `total` is the sum. Every warp scans the warps' totals for itself, which
/// is cheaper than another barrier. Shared memory written before the call is visible after it.
__device__ __forceinline__ Extent block_scan(Extent own, Extent& total) {
  __shared__ Extent warp_total[kWarp];
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  const Extent inclusive = warp_scan(own, lane);
  if (lane == kWarp - 1) warp_total[warp] = inclusive;
  __syncthreads();
  const Extent totals = warp_scan(lane < blockDim.x / kWarp ? warp_total[lane] : Extent{0, 0}, lane);
  total = shuffle(totals, kWarp - 1);
  const Extent warps = shuffle(totals, warp == 0 ? 0 : warp - 1);
  const Extent exclusive = inclusive - own;
  return warp == 0 ? exclusive : exclusive + warps;
}

/// Batches of at most a block: one request per thread, and all that its rows need in shared memory.
template <typename Source>
__global__ void __launch_bounds__(kMaxThreads, 1) prefill_medium_kernel(
    const __grid_constant__ PrefillParams params, const __grid_constant__ PrefillRange range,
    const __grid_constant__ Source lengths) {
  __shared__ Extent start[kMaxThreads];
  __shared__ Tokens tokens[kMaxThreads];
  __shared__ int64_t rid[kMaxThreads];
  const PrefillOutput out = in_registers(params.outputs[blockIdx.y]);
  const BatchView<Source> view{params, out, range, lengths};
  const Extent before{range.row_begin[blockIdx.y], range.ragged_begin};
  Extent own{0, 0};
  if (threadIdx.x < range.batch) {
    rid[threadIdx.x] = view.rid(threadIdx.x);
    Tokens mine;
    own = view.extent_of(lengths[threadIdx.x], mine);
    tokens[threadIdx.x] = mine;
  }
  Extent sum;
  start[threadIdx.x] = before + block_scan(own, sum);
  __syncthreads();
  uint32_t row_end;
  for_rows(range, row_end, [&](uint32_t row) {
    if (row >= row_end) return;
    if (row >= before.rows + sum.rows) return store_invalid(out, row);
    const uint32_t i = last_not_behind(range.batch, row, [&](uint32_t k) { return start[k].rows; });
    view.store(row, tokens[i], rid[i], i, start[i]);
  });
}

/// Larger batches: buckets of requests, which the blocks of a cluster sum together.
template <typename Source>
__global__ void __launch_bounds__(kMaxThreads, 1) prefill_large_kernel(
    const __grid_constant__ PrefillParams params, const __grid_constant__ PrefillRange range,
    const __grid_constant__ Source lengths) {
  __shared__ Extent bucket[kMaxBuckets + kMaxBuckets / 4];  // first their extents, then where they start
  const PrefillOutput out = in_registers(params.outputs[blockIdx.y]);
  const BatchView<Source> view{params, out, range, lengths};
  const Extent before{range.row_begin[blockIdx.y], range.ragged_begin};
  uint32_t size_log2 = 0;
  while (kMaxBuckets << size_log2 < range.batch) ++size_log2;
  const uint32_t buckets = (range.batch + (1u << size_log2) - 1) >> size_log2;
  sum_buckets(view, size_log2, bucket);

  const uint32_t per_thread = div_ceil(buckets, blockDim.x);
  const uint32_t begin = min(threadIdx.x * per_thread, buckets);
  const uint32_t end = min(begin + per_thread, buckets);
  Extent own{0, 0};
  for (uint32_t b = begin; b < end; ++b) own = own + bucket[padded(b)];
  Extent sum;
  Extent next = before + block_scan(own, sum);
  for (uint32_t b = begin; b < end; ++b) {
    const Extent extent = bucket[padded(b)];
    bucket[padded(b)] = next;
    next = next + extent;
  }
  __syncthreads();

  uint32_t row_end;
  for_rows(range, row_end, [&](uint32_t row) {
    if (row >= row_end) return;
    if (row >= before.rows + sum.rows) return store_invalid(out, row);
    const uint32_t b = last_not_behind(buckets, row, [&](uint32_t k) { return bucket[padded(k)].rows; });
    uint32_t i = b << size_log2;
    Extent at = bucket[padded(b)];
    Tokens tokens;
    for (;; ++i) {
      const Extent extent = view.extent_of(lengths[i], tokens);
      if (row - at.rows < extent.rows) break;
      at = at + extent;
    }
    view.store(row, tokens, view.rid(i), i, at);
  });
}

}  // namespace hotplan::compress
