/// \file launch.cu
/// \brief The CUDA backend: instantiates the kernels, chooses grids, packs lengths from the CPU into parameters.
#include <sgl_kernel/utils.cuh>

#include <hotplan/compress/decode.cuh>
#include <hotplan/compress/prefill.cuh>

#include "launch.h"

namespace hotplan::compress {

namespace {

using host::DeviceGuard;
using host::LaunchKernel;

/// Requests whose lengths fit beside the other parameters of a launch, in sizes: the driver copies all of them.
using FewLengths = InlineLengths<kWarp>;
using SomeLengths = InlineLengths<1024>;
using ManyLengths = InlineLengths<3840>;
static_assert(sizeof(ManyLengths) + sizeof(PrefillParams) + sizeof(PrefillRange) <= 32764);
static_assert(sizeof(ManyLengths) + sizeof(DecodeParams) + 16 <= 32764);

struct Device {
  uint32_t processors;
  bool has_clusters;
};

Status device_of(int device, Device& d) {
  return host::once_per_device(device, d, [device](Device& found) {
    found.processors = host::device_attribute(cudaDevAttrMultiProcessorCount, device);
    found.has_clusters = host::device_attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9;
    return cudaSuccess;
  });
}

/// How a batch is cut into blocks. A block that scans the batch should have many rows to show for it, so there are no
/// more blocks than keep every processor busy; the numbers were measured (benchmark/NOTES.md).
struct PrefillShape {
  uint32_t threads;
  uint32_t blocks;   // of each output
  uint32_t cluster;  // blocks that sum a large batch together
};

PrefillShape prefill_shape(uint32_t batch, uint32_t rows, uint32_t num_outputs, const Device& device) {
  const uint32_t chunks = div_ceil(rows, kWarp);
  if (batch <= kWarp) {
    return {256, clamp_to(div_ceil(chunks, 8u), 1u, max_of(2 * device.processors / num_outputs, 1u)), 1};
  }
  PrefillShape shape{batch > 512 ? kMaxThreads : 512, 0, 1};
  uint32_t busy = device.processors;
  if (batch > kMaxThreads && device.has_clusters) {
    // A cluster's blocks lie in one graphics processing cluster, whose processors are no multiple of 8: the last of 16
    // clusters would wait for the first.
    shape.cluster = kCluster;
    busy = busy * 27 / 32;
  }
  const uint32_t blocks = min_of(div_ceil(chunks, 4u), busy / num_outputs);
  shape.blocks = max_of(blocks / shape.cluster, 1u) * shape.cluster;
  return shape;
}

template <typename Source>
Status launch_prefill(const PrefillParams& params, const PrefillRange& range, const Source& lengths, Queue queue) {
  uint32_t rows = 0;
  for (uint32_t o = 0; o < params.num_outputs; ++o) rows = max_of(rows, range.row_end[o] - range.row_begin[o]);
  if (rows == 0) return 0;
  Device device;
  const Status status = device_of(queue.device, device);
  if (status != 0) return status;
  const PrefillShape shape = prefill_shape(range.batch, rows, params.num_outputs, device);
  LaunchKernel launch(dim3(shape.blocks, params.num_outputs), shape.threads, queue.stream);
  if (shape.cluster > 1) launch.enable_cluster(dim3(shape.cluster));
  // Inline lengths come in the smallest size that holds the batch, or a run of it: one kernel each is enough.
  constexpr uint32_t kCapacity = Source::kCapacity;
  if constexpr (kCapacity == FewLengths::kCapacity || kCapacity == kUnlimited) {
    if (range.batch <= kWarp) return launch(prefill_small_kernel<Source>, params, range, lengths);
  }
  if constexpr (kCapacity == SomeLengths::kCapacity || kCapacity == kUnlimited) {
    if (range.batch <= kMaxThreads) return launch(prefill_medium_kernel<Source>, params, range, lengths);
  }
  if constexpr (kCapacity == ManyLengths::kCapacity || kCapacity == kUnlimited) {
    return launch(prefill_large_kernel<Source>, params, range, lengths);
  }
  return cudaErrorInvalidValue;  // not reached
}

/// Fills the inline lengths of requests [begin, begin + count).
template <typename Inline>
void pack(Inline& lengths, const Lengths& source, uint32_t begin, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    lengths.pair[i].x = static_cast<int>(source.seq[begin + i]);
    lengths.pair[i].y = source.extend ? static_cast<int>(source.extend[begin + i]) : 0;
  }
}

/// The range of the launch after `range`, which was about `range.batch` requests: its rows begin where those end.
void advance(const PrefillParams& params, PrefillRange& range) {
  for (uint32_t o = 0; o < params.num_outputs; ++o) range.row_begin[o] = range.row_end[o];
  const uint32_t end = range.first + range.batch;
  for (uint32_t i = range.first; i < end; ++i) {
    range.ragged_begin += ragged_ids(params.lengths.extend[i], params.num_q_tokens);
  }
  range.first = end;
}

/// Lengths from the CPU: one launch, or, for batches past a launch's parameters, one launch per run of requests, each
/// writing the rows of its own requests and the last also the invalid rows.
template <typename Inline>
Status prefill_from_host(const PrefillParams& params, Queue queue) {
  Inline lengths;
  PrefillRange range{};
  while (range.first < params.batch) {
    range.batch = min_of(params.batch - range.first, Inline::kCapacity);
    const bool last = range.first + range.batch == params.batch;
    for (uint32_t o = 0; o < params.num_outputs; ++o) {
      const PrefillOutput& out = params.outputs[o];
      range.row_end[o] = last ? out.num_rows : range.row_begin[o];
      for (uint32_t i = range.first; !last && i < range.first + range.batch; ++i) {
        const Tokens t = tokens_for(out, params.lengths.seq[i], params.lengths.extend[i], params.num_q_tokens);
        range.row_end[o] += count_rows(out, t);
      }
    }
    pack(lengths, params.lengths, range.first, range.batch);
    const Status status = launch_prefill(params, range, lengths, queue);
    if (status != 0 || last) return status;
    advance(params, range);
  }
  return 0;
}

template <typename Source>
Status launch_decode(
    const DecodeParams& params, const Source& lengths, uint32_t begin, uint32_t count, cudaStream_t stream) {
  constexpr uint32_t kThreads = 128;
  const dim3 grid(div_ceil(count, kThreads), params.num_outputs);
  return LaunchKernel(grid, kThreads, stream)(decode_kernel<Source>, params, lengths, begin, count);
}

template <typename Inline>
Status decode_from_host(const DecodeParams& params, cudaStream_t stream) {
  Inline lengths;
  for (uint32_t begin = 0; begin < params.batch; begin += Inline::kCapacity) {
    const uint32_t count = min_of(params.batch - begin, Inline::kCapacity);
    pack(lengths, params.lengths, begin, count);
    const Status status = launch_decode(params, lengths, begin, count, stream);
    if (status != 0) return status;
  }
  return 0;
}

}  // namespace

Status run_prefill(const PrefillParams& params, Queue queue) {
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  if (params.lengths.on_host && params.batch > 0) {
    if (params.batch <= FewLengths::kCapacity) return prefill_from_host<FewLengths>(params, queue);
    if (params.batch <= SomeLengths::kCapacity) return prefill_from_host<SomeLengths>(params, queue);
    return prefill_from_host<ManyLengths>(params, queue);
  }
  PrefillRange range{};
  range.batch = params.batch;
  for (uint32_t o = 0; o < params.num_outputs; ++o) range.row_end[o] = params.outputs[o].num_rows;
  return launch_prefill(params, range, GlobalLengths{params.lengths.seq, params.lengths.extend}, queue);
}

Status run_decode(const DecodeParams& params, Queue queue) {
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  if (params.lengths.on_host) {
    return params.batch <= SomeLengths::kCapacity ? decode_from_host<SomeLengths>(params, queue.stream)
                                                  : decode_from_host<ManyLengths>(params, queue.stream);
  }
  return launch_decode(params, GlobalLengths{params.lengths.seq, nullptr}, 0, params.batch, queue.stream);
}

Status run_verify(const VerifyParams& params, Queue queue) {
  const DeviceGuard guard(queue.device);
  if (guard.status() != cudaSuccess) return guard.status();
  constexpr uint32_t kThreads = 128;
  return LaunchKernel(div_ceil(params.batch, kThreads), kThreads, queue.stream)(verify_kernel, params);
}

const char* status_text(Status status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

}  // namespace hotplan::compress
