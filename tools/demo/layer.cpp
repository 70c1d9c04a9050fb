#include "tools/demo/layer.hpp"

#include <algorithm>

#include "csrc/support/format.hpp"
#include "deep_ep/buffer.hpp"
#include "oracle/low_latency.hpp"
#include "tools/common/check_rows.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

BufferOptions buffer_options(const ModelShape& shape, const std::vector<Batch>& batches) {
  const auto ranks = static_cast<int>(batches.size());
  const std::int64_t most = std::ranges::max_element(batches, {}, &Batch::tokens)->tokens;
  BufferOptions options;
  options.heap_bytes =
      Buffer::heap_bytes_hint(ranks, std::max<std::int64_t>(most, 1), std::int64_t{shape.hidden} * 2, shape.topk);
  options.max_local_experts = std::max(options.max_local_experts, shape.experts / ranks);
  return options;
}

/// One rank's part; `expected`: what it must receive.
double run_rank(const ModelShape& shape, const std::vector<Batch>& batches, const oracle::Received& expected,
                const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor) {
  const int rank = bootstrap->rank();
  const int ranks = bootstrap->size();
  const Batch& batch = batches[static_cast<std::size_t>(rank)];
  const OwnStream stream(*executor);
  const CallOptions call{.stream = stream};
  Buffer buffer(bootstrap, executor, buffer_options(shape, batches));
  DeviceTensor x(*executor, DType::bfloat16, {batch.tokens, shape.hidden});
  DeviceTensor experts(*executor, DType::int64, {batch.tokens, shape.topk});
  DeviceTensor weights(*executor, DType::float32, {batch.tokens, shape.topk});
  x.upload(batch.x.data(), stream);
  experts.upload(batch.experts.data(), stream);
  weights.upload(batch.weights.data(), stream);

  // 1. Count the tokens that each rank needs, and send every token to the ranks that own its experts.
  const DispatchLayout layout = buffer.get_dispatch_layout(experts.view(), shape.experts, call);
  DispatchArguments dispatch;
  dispatch.x = x.view();
  dispatch.use(layout);
  dispatch.topk_idx = experts.view();
  dispatch.topk_weights = weights.view();
  const DispatchResult received = buffer.dispatch(dispatch, call);

  // 2. The experts of this rank, on the CPU. Their output replaces the received rows, from where combine can pull it.
  auto rows = to_host<std::uint16_t>(*executor, received.recv_x.view(), stream);
  const auto local_experts = to_host<std::int64_t>(*executor, received.recv_topk_idx->view(), stream);
  const auto row_weights = to_host<float>(*executor, received.recv_topk_weights->view(), stream);
  check_rows(expected, rank, "rows", rows, static_cast<std::size_t>(shape.hidden),
             [&](int source, std::int64_t token, auto row) {
               const std::vector<std::uint16_t>& sent = batches[static_cast<std::size_t>(source)].x;
               std::copy_n(sent.begin() + token * shape.hidden, row.size(), row.begin());
             });
  check_selection(expected, rank, local_experts, row_weights);
  check_counts(expected, rank, received.num_recv_tokens_per_expert);
  apply_experts(shape, rank * (shape.experts / ranks), rows, local_experts, row_weights);
  upload(*executor, received.recv_x.view(), rows.data(), stream);

  // 3. Bring the results home and add them up.
  CombineArguments combine;
  combine.x = received.recv_x.view();
  combine.handle = &received.handle;
  combine.topk_weights = received.recv_topk_weights->view();
  const CombineResult combined = buffer.combine(combine, call);
  const auto output = to_host<std::uint16_t>(*executor, combined.combined_x.view(), stream);
  const double error = check_output(shape, batch, rank, ranks, output);
  // Every weight went to one rank and comes back from it alone, so it must be exactly the same number.
  if (to_host<float>(*executor, combined.combined_topk_weights->view(), stream) != batch.weights) {
    fail<Error>("check: combined top-k weights of rank {} are not those sent", rank);
  }
  buffer.destroy();
  return error;
}

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

double check_output(const ModelShape& shape, const Batch& batch, int rank, int ranks,
                    std::span<const std::uint16_t> output) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto topk = static_cast<std::size_t>(shape.topk);
  std::vector<std::uint16_t> expert_rows(topk * hidden);
  std::vector<std::vector<oracle::WeightedRow>> rows_of_ranks(static_cast<std::size_t>(ranks));
  return check_sums(rank, batch.tokens, shape.hidden, output, /*exact=*/false, [&](std::int64_t of_token) {
    const auto token = static_cast<std::size_t>(of_token);
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
    return oracle::combine_row(rank, rows_of_ranks, shape.hidden);
  });
}

double run_layer(const ModelShape& shape, const std::vector<Batch>& batches, const oracle::Dispatched& routes,
                 Device::Kind device) {
  const auto ranks = static_cast<int>(batches.size());
  const auto bootstraps = make_thread_bootstraps(ranks);
  std::vector<double> errors(batches.size());
  run_ranks(ranks, [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    errors[at] = run_rank(shape, batches, routes.received[at], bootstraps[at], make_executor(device, rank));
  });
  return *std::ranges::max_element(errors);
}

}  // namespace deep_ep::tools
