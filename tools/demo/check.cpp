#include "tools/demo/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "deep_ep/error.hpp"
#include "oracle/low_latency.hpp"

namespace deep_ep::tools {

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
    throw Error(fmt::format("check: output of rank {}: {} values, expected {}", rank, output.size(), batch.x.size()));
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
      throw Error(fmt::format("check: output of rank {}, token {}, channel {}: {}, expected {}", rank, token, h, seen,
                              expected.sum[h]));
    }
  }
  return error;
}

}  // namespace deep_ep::tools
