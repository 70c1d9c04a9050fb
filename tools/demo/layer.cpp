#include "tools/demo/layer.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <utility>

#include "csrc/support/format.hpp"
#include "deep_ep/buffer.hpp"
#include "deep_ep/error.hpp"
#include "oracle/bf16.hpp"
#include "oracle/low_latency.hpp"
#include "tools/common/check_rows.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

/// The data that the ranks share.
struct Layer {
  const ModelShape& shape;
  const std::vector<Batch>& batches;
  const oracle::Dispatched& routes;
  TokenPlace followed;
  std::mutex mutex;
  LayerResult result;

  int ranks() const { return static_cast<int>(batches.size()); }
  int local_experts() const { return shape.experts / ranks(); }
  void add_error(const OutputError& error) {
    const std::lock_guard lock(mutex);
    result.error.largest = std::max(result.error.largest, error.largest);
    result.error.largest_of_bound = std::max(result.error.largest_of_bound, error.largest_of_bound);
  }
  void add_time(std::size_t phase, double seconds) {
    const std::lock_guard lock(mutex);
    double& slowest = result.phase_seconds[phase];
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
    DeviceTensor x(executor_, DType::bfloat16, {batch_.tokens, shape.hidden});
    DeviceTensor experts(executor_, DType::int64, {batch_.tokens, shape.topk});
    DeviceTensor weights(executor_, DType::float32, {batch_.tokens, shape.topk});
    x.upload(batch_.x.data(), stream_);
    experts.upload(batch_.experts.data(), stream_);
    weights.upload(batch_.weights.data(), stream_);

    // 1. Who needs which token?
    DispatchLayout layout;
    timed(0, [&] { layout = buffer_.get_dispatch_layout(experts.view(), shape.experts, call_); });

    // 2. Send every token to the ranks that own its experts.
    DispatchResult received;
    timed(1, [&] {
      DispatchArguments arguments;
      arguments.x = x.view();
      arguments.use(layout);
      arguments.topk_idx = experts.view();
      arguments.topk_weights = weights.view();
      received = buffer_.dispatch(arguments, call_);
    });

    // 3. The experts of this rank, on the CPU. Their output replaces the received rows, from where combine can pull it.
    auto rows = to_host<std::uint16_t>(executor_, received.recv_x.view(), stream_);
    const auto local_experts = to_host<std::int64_t>(executor_, received.recv_topk_idx->view(), stream_);
    const auto row_weights = to_host<float>(executor_, received.recv_topk_weights->view(), stream_);
    check_received(rows, local_experts, row_weights, received.num_recv_tokens_per_expert);
    const std::optional<std::size_t> followed = find_followed();
    if (followed) note_arrival(*followed, rows, local_experts, row_weights);
    timed(2, [&] {
      const int first_expert = rank_ * layer_.local_experts();
      apply_experts(shape, first_expert, rows, local_experts, row_weights);
    });
    if (followed) visit()->sent_back = first_channel(rows, *followed);
    upload(executor_, received.recv_x.view(), rows.data(), stream_);

    // 4. Bring the results home and add them up.
    CombineResult combined;
    timed(3, [&] {
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
    options.heap_bytes =
        Buffer::heap_bytes_hint(static_cast<int>(layer.batches.size()), most_tokens, row_bytes, layer.shape.topk);
    options.max_local_experts = std::max(options.max_local_experts, layer.local_experts());
    return options;
  }

  /// All ranks start together; the time counts until this rank's last kernel.
  template <class Step>
  void timed(std::size_t phase, Step&& step) {
    bootstrap_.barrier();
    if (rank_ == 0) show_progress(fmt::format("[{}/{}] {}", phase + 1, kPhases.size(), kPhases[phase]));
    const auto begin = std::chrono::steady_clock::now();
    step();
    executor_.synchronize(stream_);
    layer_.add_time(phase, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }

  const oracle::Received& expected() const { return layer_.routes.received[static_cast<std::size_t>(rank_)]; }

  void check_received(const std::vector<std::uint16_t>& rows, const std::vector<std::int64_t>& local_experts,
                      const std::vector<float>& weights, const std::vector<int>& rows_per_expert) {
    const auto hidden = static_cast<std::size_t>(layer_.shape.hidden);
    check_rows(expected(), rank_, "rows", rows, hidden, [&](int source, std::int64_t token, auto row) {
      const std::vector<std::uint16_t>& x = layer_.batches[static_cast<std::size_t>(source)].x;
      std::copy_n(x.begin() + token * layer_.shape.hidden, hidden, row.begin());
    });
    check_selection(expected(), rank_, local_experts, weights);
    check_counts(expected(), rank_, rows_per_expert);
  }

  void check_combined(const CombineResult& combined) {
    const auto output = to_host<std::uint16_t>(executor_, combined.combined_x.view(), stream_);
    layer_.add_error(check_output(layer_.shape, batch_, rank_, layer_.ranks(), output));
    // Every weight went to one rank and comes back from it alone, so it must be exactly the same number.
    if (to_host<float>(executor_, combined.combined_topk_weights->view(), stream_) != batch_.weights) {
      fail<Error>("check: combined top-k weights of rank {} are not those sent", rank_);
    }
    if (rank_ == layer_.followed.rank) {
      layer_.result.came_home = first_channel(output, static_cast<std::size_t>(layer_.followed.token));
    }
  }

  // The way of the followed token. Each rank writes down its own part.
  std::optional<TokenVisit>& visit() { return layer_.result.visits[static_cast<std::size_t>(rank_)]; }
  float first_channel(const std::vector<std::uint16_t>& rows, std::size_t row) const {
    return oracle::bf16_value(rows[row * static_cast<std::size_t>(layer_.shape.hidden)]);
  }
  std::optional<std::size_t> find_followed() const {
    for (std::size_t row = 0; row < expected().src_rank.size(); ++row) {
      const bool is_it =
          expected().src_rank[row] == layer_.followed.rank && expected().src_idx[row] == layer_.followed.token;
      if (is_it) return row;
    }
    return std::nullopt;
  }
  void note_arrival(std::size_t row, const std::vector<std::uint16_t>& rows,
                    const std::vector<std::int64_t>& local_experts, const std::vector<float>& weights) {
    TokenVisit arrival;
    arrival.row = static_cast<std::int64_t>(row);
    arrival.arrived = first_channel(rows, row);
    const auto topk = static_cast<std::size_t>(layer_.shape.topk);
    for (std::size_t k = row * topk; k < (row + 1) * topk; ++k) {
      if (local_experts[k] < 0) continue;
      arrival.experts.emplace_back(rank_ * layer_.local_experts() + static_cast<int>(local_experts[k]), weights[k]);
    }
    visit() = std::move(arrival);
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

oracle::Dispatched routes_of(const ModelShape& shape, std::span<const Batch> batches) {
  std::vector<oracle::DispatchInput> inputs;
  for (const Batch& batch : batches) {
    oracle::DispatchInput input;
    input.tokens = batch.tokens;
    input.selection = {batch.tokens, shape.topk, batch.experts, batch.weights};
    input.layout = oracle::layout(input.selection, static_cast<int>(batches.size()), shape.experts);
    inputs.push_back(std::move(input));
  }
  return oracle::dispatch(inputs, shape.experts, 1);
}

OutputError check_output(const ModelShape& shape, const Batch& batch, int rank, int ranks,
                         std::span<const std::uint16_t> output) {
  if (output.size() != batch.x.size()) {
    fail<Error>("check: output of rank {}: {} values, expected {}", rank, output.size(), batch.x.size());
  }
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto topk = static_cast<std::size_t>(shape.topk);
  OutputError error;
  std::vector<std::uint16_t> expert_rows(topk * hidden);
  std::vector<std::vector<oracle::WeightedRow>> rows_of_ranks(static_cast<std::size_t>(ranks));
  for (std::size_t token = 0; token < static_cast<std::size_t>(batch.tokens); ++token) {
    for (auto& rows : rows_of_ranks) rows.clear();
    for (std::size_t k = 0; k < topk; ++k) {
      const std::int64_t expert = batch.experts[token * topk + k];
      const auto row = std::span(expert_rows).subspan(k * hidden, hidden);
      apply_expert(static_cast<int>(expert), std::span(batch.x).subspan(token * hidden, hidden), row);
      rows_of_ranks[static_cast<std::size_t>(expert / (shape.experts / ranks))].push_back(
          {row, batch.weights[token * topk + k]});
    }
    // Each rank rounds the weighted sum of its experts, and the token's rank the sum of those: what low-latency combine
    // does in one call.
    const auto expected = oracle::low_latency_combine_token(rank, rows_of_ranks, shape.hidden);
    for (std::size_t h = 0; h < hidden; ++h) {
      const double seen = static_cast<double>(oracle::bf16_value(output[token * hidden + h]));
      const double difference = std::fabs(seen - expected.sum[h]);
      error.largest = std::max(error.largest, difference);
      error.largest_of_bound = std::max(error.largest_of_bound, difference / expected.tolerance[h]);
      if (difference <= expected.tolerance[h]) continue;
      fail<Error>("check: output of rank {}, token {}, channel {}: {}, expected {}", rank, token, h, seen,
                  expected.sum[h]);
    }
  }
  return error;
}

LayerResult run_layer(const ModelShape& shape, const std::vector<Batch>& batches, const oracle::Dispatched& routes,
                      const TokenPlace& followed, Device::Kind device) {
  const auto ranks = static_cast<int>(batches.size());
  const auto bootstraps = make_thread_bootstraps(ranks);
  Layer layer{shape, batches, routes, followed, {}, {}};
  layer.result.visits.resize(batches.size());
  run_ranks(ranks, [&](int rank) {
    const auto executor = make_executor(device, rank);
    // The first pass on a GPU loads kernels and fills pools; the second one is what later calls cost.
    const int passes = device == Device::Kind::cuda ? 2 : 1;
    for (int pass = 0; pass < passes; ++pass) {
      bootstraps[static_cast<std::size_t>(rank)]->barrier();
      if (rank == 0) layer.result.phase_seconds = {};
      LayerRank(layer, bootstraps[static_cast<std::size_t>(rank)], executor).run();
    }
  });
  clear_progress();
  return layer.result;
}

}  // namespace deep_ep::tools
