#include "tools/demo/reference.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tools/common/number_formats.hpp"

namespace deep_ep::tools {
namespace {

void note(Difference& error, std::string where) {
  if (error.differing++ == 0) error.first = std::move(where);
}

}  // namespace

Reference::Reference(const ModelShape& shape, std::span<const Batch> batches)
    : shape_(shape), batches_(batches), rows_(batches.size()), expert_load_(static_cast<std::size_t>(shape.experts)) {
  const auto topk = static_cast<std::size_t>(shape.topk);
  std::vector<bool> wanted(batches.size());
  for (int source = 0; source < ranks(); ++source) {
    const Batch& batch = batches[static_cast<std::size_t>(source)];
    for (std::int64_t token = 0; token < batch.tokens; ++token) {
      std::fill(wanted.begin(), wanted.end(), false);
      for (std::size_t k = 0; k < topk; ++k) {
        const std::int64_t expert = batch.experts[static_cast<std::size_t>(token) * topk + k];
        wanted[static_cast<std::size_t>(owner(expert))] = true;
        ++expert_load_[static_cast<std::size_t>(expert)];
      }
      for (std::size_t rank = 0; rank < wanted.size(); ++rank) {
        if (wanted[rank]) rows_[rank].push_back({source, token});
      }
    }
  }
}

std::int64_t Reference::count(int source, int destination) const {
  return std::ranges::count(rows(destination), source, &ExpectedRow::source);
}

Difference Reference::check_rows(int rank, const char* what, std::span<const std::byte> received,
                                 std::span<const std::span<const std::byte>> sources, std::size_t row_bytes) const {
  Difference error;
  if (received.size() != rows(rank).size() * row_bytes) {
    note(error, fmt::format("{}: rank {} received {} rows, expected {}", what, rank, received.size() / row_bytes,
                            rows(rank).size()));
    return error;
  }
  for (std::size_t i = 0; i < rows(rank).size(); ++i) {
    const ExpectedRow& row = rows(rank)[i];
    const std::byte* source =
        sources[static_cast<std::size_t>(row.source)].data() + static_cast<std::size_t>(row.token) * row_bytes;
    if (std::memcmp(received.data() + i * row_bytes, source, row_bytes) != 0) {
      note(error,
           fmt::format("{}: row {} of rank {} is not token {} of rank {}", what, i, rank, row.token, row.source));
    }
  }
  return error;
}

Difference Reference::check_selection(int rank, std::span<const std::int64_t> local_experts,
                                      std::span<const float> weights) const {
  Difference error;
  const auto topk = static_cast<std::size_t>(shape_.topk);
  const std::size_t expected = rows(rank).size() * topk;
  if (local_experts.size() != expected || weights.size() != expected) {
    note(error, fmt::format("top-k of rank {}: {} entries, expected {}", rank, local_experts.size(), expected));
    return error;
  }
  const std::int64_t first = std::int64_t{rank} * this->local_experts();
  for (std::size_t i = 0; i < expected; ++i) {
    const ExpectedRow& row = rows(rank)[i / topk];
    const Batch& batch = batches_[static_cast<std::size_t>(row.source)];
    const std::size_t at = static_cast<std::size_t>(row.token) * topk + i % topk;
    const bool here = owner(batch.experts[at]) == rank;
    const std::int64_t expert = here ? batch.experts[at] - first : -1;
    const float weight = here ? batch.weights[at] : 0.0f;
    if (local_experts[i] != expert || weights[i] != weight) {
      note(error, fmt::format("top-k entry {} of row {} of rank {}: expert {} with weight {}, expected {} with {}",
                              i % topk, i / topk, rank, local_experts[i], weights[i], expert, weight));
    }
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
  std::vector<double> sum(hidden);
  std::vector<double> magnitude(hidden);
  for (std::size_t token = 0; token < static_cast<std::size_t>(batch.tokens); ++token) {
    std::fill(sum.begin(), sum.end(), 0.0);
    std::fill(magnitude.begin(), magnitude.end(), 0.0);
    const std::uint16_t* x = batch.x.data() + token * hidden;
    for (std::size_t k = token * topk; k < (token + 1) * topk; ++k) {
      const double factor = static_cast<double>(batch.weights[k]) * expert_scale(static_cast<int>(batch.experts[k]));
      for (std::size_t h = 0; h < hidden; ++h) {
        const double term = factor * bf16_to_float(x[h]);
        sum[h] += term;
        magnitude[h] += std::fabs(term);
      }
    }
    for (std::size_t h = 0; h < hidden; ++h) {
      const double difference = std::fabs(static_cast<double>(bf16_to_float(output[token * hidden + h])) - sum[h]);
      // Three values are rounded to BF16, each by at most 2^-8 of what it holds: the expert's output, the rank's sum
      // and the final sum. fp32 sums add a little.
      const double bound = 3.05 * 0x1p-8 * magnitude[h] + 1e-30;
      error.largest = std::max(error.largest, difference);
      error.largest_of_bound = std::max(error.largest_of_bound, difference / bound);
      if (!(difference <= bound)) {
        note(error, fmt::format("output of rank {}, token {}, channel {}: {}, expected {}", rank, token, h,
                                bf16_to_float(output[token * hidden + h]), sum[h]));
      }
    }
  }
  return error;
}

}  // namespace deep_ep::tools
