#include "tools/demo/layer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>

#include "deep_ep/buffer.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

constexpr auto kPhases = static_cast<std::size_t>(Phase::count);

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

/// What the ranks share.
struct Layer {
  const ModelShape& shape;
  const std::vector<Batch>& batches;
  const std::vector<QuantizedRows>& quantized;
  const Reference& reference;
  std::mutex mutex;
  LayerResult result;

  void add(const Difference& error) {
    const std::lock_guard lock(mutex);
    result.output.largest = std::max(result.output.largest, error.largest);
    result.output.largest_of_bound = std::max(result.output.largest_of_bound, error.largest_of_bound);
    if (error.differing > 0) {
      result.output.differing += error.differing;
      result.failures.push_back(fmt::format("{} ({} in all)", error.first, error.differing));
    }
  }
  void add_time(Phase phase, double seconds) {
    const std::lock_guard lock(mutex);
    double& slowest = result.phase_seconds[static_cast<std::size_t>(phase)];
    slowest = std::max(slowest, seconds);
  }
};

class LayerRank {
 public:
  LayerRank(Layer& layer, const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor)
      : layer_(layer),
        bootstrap_(*bootstrap),
        executor_(*executor),
        rank_(bootstrap->rank()),
        batch_(layer.batches[static_cast<std::size_t>(rank_)]),
        stream_(*executor),
        call_{stream_, {}, false},
        buffer_(bootstrap, executor, buffer_options(layer)) {}

  void run() {
    const ModelShape& shape = layer_.shape;
    const QuantizedRows& quantized = layer_.quantized[static_cast<std::size_t>(rank_)];
    DeviceTensor x(executor_, DType::bfloat16, {batch_.tokens, shape.hidden});
    DeviceTensor x_8bit(executor_, DType::float8_e4m3, {batch_.tokens, shape.hidden});
    DeviceTensor scales(executor_, DType::float32, {batch_.tokens, quantized.blocks});
    DeviceTensor experts(executor_, DType::int64, {batch_.tokens, shape.topk});
    DeviceTensor weights(executor_, DType::float32, {batch_.tokens, shape.topk});
    x.upload(batch_.x.data(), stream_);
    x_8bit.upload(quantized.x.data(), stream_);
    scales.upload(quantized.scales.data(), stream_);
    experts.upload(batch_.experts.data(), stream_);
    weights.upload(batch_.weights.data(), stream_);

    // 1. Who needs which token?
    DispatchLayout layout;
    timed(Phase::layout, [&] { layout = buffer_.get_dispatch_layout(experts.view(), shape.experts, call_); });

    // 2. Send every token to the ranks that own its experts.
    DispatchResult received;
    timed(Phase::dispatch, [&] {
      DispatchArguments arguments;
      arguments.x = x.view();
      arguments.use(layout);
      arguments.topk_idx = experts.view();
      arguments.topk_weights = weights.view();
      received = buffer_.dispatch(arguments, call_);
    });

    // 3. The same once more as 8-bit rows with scales, along the routes that are known now.
    CachedDispatchResult received_8bit;
    timed(Phase::dispatch_8bit, [&] {
      CachedDispatchArguments arguments;
      arguments.x = x_8bit.view();
      arguments.x_scales = scales.view();
      arguments.handle = &received.handle;
      received_8bit = buffer_.cached_dispatch(arguments, call_);
    });

    // 4. The experts of this rank, on the CPU. Their output replaces the received rows, from where combine can pull it.
    auto rows = to_host<std::uint16_t>(executor_, received.recv_x.view(), stream_);
    const auto local_experts = to_host<std::int64_t>(executor_, received.recv_topk_idx->view(), stream_);
    const auto row_weights = to_host<float>(executor_, received.recv_topk_weights->view(), stream_);
    check_received(rows, local_experts, row_weights, received_8bit, received.num_recv_tokens_per_expert);
    timed(Phase::experts, [&] {
      const int first_expert = rank_ * layer_.reference.local_experts();
      apply_experts(shape, first_expert, rows, local_experts, row_weights);
    });
    upload(executor_, received.recv_x.view(), rows.data(), stream_);

    // 5. Bring the results home and add them up.
    CombineResult combined;
    timed(Phase::combine, [&] {
      CombineArguments arguments;
      arguments.x = received.recv_x.view();
      arguments.handle = &received.handle;
      arguments.topk_weights = received.recv_topk_weights->view();
      combined = buffer_.combine(arguments, call_);
    });
    check_combined(combined);
    buffer_.destroy();
  }

 private:
  static BufferOptions buffer_options(const Layer& layer) {
    std::int64_t most_tokens = 1;
    for (const Batch& batch : layer.batches) most_tokens = std::max(most_tokens, batch.tokens);
    const auto row_bytes = std::int64_t{layer.shape.hidden} * 2;
    BufferOptions options;
    // Twice: the rows of both dispatches live at the same time.
    options.heap_bytes =
        2 * Buffer::heap_bytes_hint(static_cast<int>(layer.batches.size()), most_tokens, row_bytes, layer.shape.topk);
    options.max_local_experts = std::max(options.max_local_experts, layer.reference.local_experts());
    return options;
  }

  /// All ranks start together; the time counts until this rank's last kernel.
  template <class Step>
  void timed(Phase phase, Step&& step) {
    bootstrap_.barrier();
    if (rank_ == 0) show_progress(fmt::format("[{}/{}] {}", static_cast<int>(phase) + 1, kPhases, name_of(phase)));
    const auto begin = std::chrono::steady_clock::now();
    step();
    executor_.synchronize(stream_);
    layer_.add_time(phase, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }

  void check_received(const std::vector<std::uint16_t>& rows, const std::vector<std::int64_t>& local_experts,
                      const std::vector<float>& weights, const CachedDispatchResult& received_8bit,
                      const std::vector<int>& rows_per_expert) {
    const Reference& reference = layer_.reference;
    std::vector<std::span<const std::byte>> sources;
    std::vector<std::span<const std::byte>> sources_8bit;
    std::vector<std::span<const std::byte>> source_scales;
    for (std::size_t source = 0; source < layer_.batches.size(); ++source) {
      sources.push_back(bytes_of(layer_.batches[source].x));
      sources_8bit.push_back(bytes_of(layer_.quantized[source].x));
      source_scales.push_back(bytes_of(layer_.quantized[source].scales));
    }
    const auto hidden = static_cast<std::size_t>(layer_.shape.hidden);
    layer_.add(reference.check_rows(rank_, "BF16 rows", bytes_of(rows), sources, hidden * 2));
    layer_.add(reference.check_selection(rank_, local_experts, weights));

    const auto rows_8bit = to_host<std::uint8_t>(executor_, received_8bit.recv_x.view(), stream_);
    const auto scales = to_host<float>(executor_, received_8bit.recv_x_scales->view(), stream_);
    const auto blocks = static_cast<std::size_t>(layer_.quantized.front().blocks);
    layer_.add(reference.check_rows(rank_, "8-bit rows", bytes_of(rows_8bit), sources_8bit, hidden));
    layer_.add(reference.check_rows(rank_, "scales", bytes_of(scales), source_scales, blocks * sizeof(float)));

    const std::vector<int>& expected = reference.received(rank_).tokens_per_expert;
    Difference counts;
    if (rows_per_expert != expected) {
      counts.differing = 1;
      counts.first = fmt::format("rows of the experts of rank {}: {}, expected {}", rank_,
                                 fmt::join(rows_per_expert, ","), fmt::join(expected, ","));
    }
    layer_.add(counts);
  }

  void check_combined(const CombineResult& combined) {
    const auto output = to_host<std::uint16_t>(executor_, combined.combined_x.view(), stream_);
    layer_.add(layer_.reference.check_output(rank_, output));
    // Every weight went to one rank and comes back from it alone, so it must be exactly the same number.
    Difference error;
    const auto weights = to_host<float>(executor_, combined.combined_topk_weights->view(), stream_);
    if (weights != batch_.weights) {
      error.differing = 1;
      error.first = fmt::format("combined top-k weights of rank {} are not those sent", rank_);
    }
    layer_.add(error);
  }

  Layer& layer_;
  Bootstrap& bootstrap_;
  Executor& executor_;
  int rank_;
  const Batch& batch_;
  Stream stream_;
  CallOptions call_;
  Buffer buffer_;
};

}  // namespace

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::layout:
      return "layout";
    case Phase::dispatch:
      return "dispatch, BF16 rows";
    case Phase::dispatch_8bit:
      return "dispatch, 8-bit rows";
    case Phase::experts:
      return "experts (on the CPU)";
    case Phase::combine:
      return "combine";
    case Phase::count:
      break;
  }
  return "?";
}

LayerResult run_layer(const ModelShape& shape, const std::vector<Batch>& batches, const Reference& reference,
                      Device::Kind device) {
  const auto ranks = static_cast<int>(batches.size());
  std::vector<QuantizedRows> quantized(batches.size());
  run_ranks(ranks, [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    quantized[at] = quantize(shape, batches[at]);
  });

  const auto bootstraps = make_thread_bootstraps(ranks);
  Layer layer{shape, batches, quantized, reference, {}, {}};
  layer.result.phase_seconds.assign(kPhases, 0.0);
  run_ranks(ranks, [&](int rank) {
    const auto executor = make_executor(device, rank);
    // The first pass on a GPU loads kernels and fills pools; the second one is what later calls cost.
    const int passes = device == Device::Kind::cuda ? 2 : 1;
    for (int pass = 0; pass < passes; ++pass) {
      bootstraps[static_cast<std::size_t>(rank)]->barrier();
      if (rank == 0) layer.result.phase_seconds.assign(kPhases, 0.0);
      LayerRank(layer, bootstraps[static_cast<std::size_t>(rank)], executor).run();
    }
  });
  clear_progress();
  return layer.result;
}

}  // namespace deep_ep::tools
