#include "tools/demo/reference.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "oracle/low_latency.hpp"

namespace deep_ep::tools {
namespace {

void note(Difference& error, std::string where) {
  if (error.differing++ == 0) error.first = std::move(where);
}

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

}  // namespace

Reference::Reference(const ModelShape& shape, std::span<const Batch> batches)
    : shape_(shape), batches_(batches), routes_(routes_of(shape, batches)) {}

std::int64_t Reference::count(int source, int destination) const {
  return std::ranges::count(received(destination).src_rank, source);
}

std::vector<std::int64_t> Reference::expert_load() const {
  std::vector<std::int64_t> load;
  for (const oracle::Received& one : routes_.received) {
    load.insert(load.end(), one.tokens_per_expert.begin(), one.tokens_per_expert.end());
  }
  return load;
}

Difference Reference::check_rows(int rank, const char* what, std::span<const std::byte> received,
                                 std::span<const std::span<const std::byte>> sources, std::size_t row_bytes) const {
  Difference error;
  const oracle::Received& expected = this->received(rank);
  const auto rows = static_cast<std::size_t>(expected.rows);
  if (received.size() != rows * row_bytes) {
    note(error, fmt::format("{}: rank {} received {} rows, expected {}", what, rank, received.size() / row_bytes, rows));
    return error;
  }
  for (std::size_t i = 0; i < rows; ++i) {
    const std::byte* source = sources[static_cast<std::size_t>(expected.src_rank[i])].data() +
                              static_cast<std::size_t>(expected.src_idx[i]) * row_bytes;
    if (std::memcmp(received.data() + i * row_bytes, source, row_bytes) != 0) {
      note(error, fmt::format("{}: row {} of rank {} is not token {} of rank {}", what, i, rank, expected.src_idx[i],
                              expected.src_rank[i]));
    }
  }
  return error;
}

Difference Reference::check_selection(int rank, std::span<const std::int64_t> local_experts,
                                      std::span<const float> weights) const {
  Difference error;
  const oracle::Received& expected = received(rank);
  if (local_experts.size() != expected.topk_idx.size() || weights.size() != expected.topk_weights.size()) {
    note(error, fmt::format("top-k of rank {}: {} entries, expected {}", rank, local_experts.size(),
                            expected.topk_idx.size()));
    return error;
  }
  const auto topk = static_cast<std::size_t>(shape_.topk);
  for (std::size_t i = 0; i < local_experts.size(); ++i) {
    if (local_experts[i] == expected.topk_idx[i] && weights[i] == expected.topk_weights[i]) continue;
    note(error, fmt::format("top-k entry {} of row {} of rank {}: expert {} with weight {}, expected {} with {}",
                            i % topk, i / topk, rank, local_experts[i], weights[i], expected.topk_idx[i],
                            expected.topk_weights[i]));
  }
  return error;
}

Difference Reference::check_output(int rank, std::span<const std::uint16_t> output) const {
  Difference error;
  const Batch& batch = batches_[static_cast<std::size_t>(rank)];
  const auto hidden = static_cast<std::size_t>(shape_.hidden);
  const auto topk = static_cast<std::size_t>(shape_.topk);
  if (output.size() != batch.x.size()) {
    note(error, fmt::format("output of rank {}: {} elements, expected {}", rank, output.size(), batch.x.size()));
    return error;
  }
  std::vector<std::uint16_t> expert_rows(topk * hidden);
  std::vector<std::vector<oracle::WeightedRow>> rows_of_ranks(batches_.size());
  for (std::size_t token = 0; token < static_cast<std::size_t>(batch.tokens); ++token) {
    for (auto& rows : rows_of_ranks) rows.clear();
    for (std::size_t k = 0; k < topk; ++k) {
      const std::int64_t expert = batch.experts[token * topk + k];
      const auto row = std::span(expert_rows).subspan(k * hidden, hidden);
      apply_expert(static_cast<int>(expert), std::span(batch.x).subspan(token * hidden, hidden), row);
      rows_of_ranks[static_cast<std::size_t>(owner(expert))].push_back({row, batch.weights[token * topk + k]});
    }
    // Each rank rounds the weighted sum of its experts, and the token's rank the sum of those: what low-latency combine
    // does in one call.
    const auto expected = oracle::low_latency_combine_token(rank, rows_of_ranks, shape_.hidden);
    for (std::size_t h = 0; h < hidden; ++h) {
      const double seen = static_cast<double>(oracle::bf16_value(output[token * hidden + h]));
      const double difference = std::fabs(seen - expected.sum[h]);
      error.largest = std::max(error.largest, difference);
      error.largest_of_bound = std::max(error.largest_of_bound, difference / expected.tolerance[h]);
      if (!(difference <= expected.tolerance[h])) {
        note(error, fmt::format("output of rank {}, token {}, channel {}: {}, expected {}", rank, token, h, seen,
                                expected.sum[h]));
      }
    }
  }
  return error;
}

}  // namespace deep_ep::tools
