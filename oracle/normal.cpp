#include "oracle/normal.hpp"

#include <array>
#include <cmath>
#include <optional>
#include <stdexcept>

namespace deep_ep::oracle {
namespace {

std::size_t index(std::int64_t row, std::int64_t width, std::int64_t column) {
  return static_cast<std::size_t>(row * width + column);
}

int align_up(int count, int alignment) { return (count + alignment - 1) / alignment * alignment; }

void append_row(Received& to, const DispatchInput& from, std::int64_t token, int source, int first_expert,
                int local_experts) {
  const auto* row = from.x.data() + static_cast<std::size_t>(token) * from.row_bytes;
  to.x.insert(to.x.end(), row, row + from.row_bytes);
  for (int s = 0; s < from.scales_per_row; ++s) to.scales.push_back(from.scales[index(token, from.scales_per_row, s)]);
  for (int k = 0; k < from.selection.topk; ++k) {
    const auto at = index(token, from.selection.topk, k);
    const std::int64_t local = from.selection.idx[at] - first_expert;
    const bool mine = local >= 0 && local < local_experts;
    to.topk_idx.push_back(mine ? local : -1);
    to.topk_weights.push_back(mine ? from.selection.weights[at] : 0.0f);
  }
  to.src_rank.push_back(source);
  to.src_idx.push_back(static_cast<std::int32_t>(token));
  ++to.rows;
}

/// Parts of a token's row, added up.
class RowSum {
 public:
  explicit RowSum(std::int64_t hidden)
      : sums_(static_cast<std::size_t>(hidden), 0.0f), exact_(sums_.size(), 0.0), tolerance_(sums_.size(), 0.0) {}

  /// One rank's part, which is rounded where it is added up.
  void add(std::span<const WeightedRow> rows) {
    for (std::size_t h = 0; h < sums_.size(); ++h) {
      float part = 0;
      double magnitude = 0;
      for (const WeightedRow& row : rows) {
        const float value = bf16_value(row.x[h]);
        part += row.weight * value;
        const double product = static_cast<double>(row.weight) * static_cast<double>(value);
        exact_[h] += product;
        magnitude += std::fabs(product);
      }
      sums_[h] += bf16_value(bf16_bits(part));
      // fp32 sums of at most 32 terms, the rounding to bfloat16.
      tolerance_[h] += magnitude * (32 * 0x1p-23 + 0x1p-8);
    }
  }

  /// A sum that others have rounded.
  void add_rounded(const RowSum& other) {
    for (std::size_t h = 0; h < sums_.size(); ++h) {
      sums_[h] += bf16_value(bf16_bits(other.sums_[h]));
      exact_[h] += other.exact_[h];
      tolerance_[h] += other.rounded_tolerance(h);
    }
  }

  Combined result() const {
    Combined rounded{{}, exact_, {}, {}};
    for (std::size_t h = 0; h < sums_.size(); ++h) {
      rounded.x.push_back(bf16_bits(sums_[h]));
      rounded.tolerance.push_back(rounded_tolerance(h));
    }
    return rounded;
  }

 private:
  double rounded_tolerance(std::size_t h) const {
    return tolerance_[h] + (std::fabs(exact_[h]) + tolerance_[h]) * 0x1p-8 + 0x1p-126;
  }

  std::vector<float> sums_;
  std::vector<double> exact_;
  std::vector<double> tolerance_;
};

}  // namespace

Layout layout(const Selection& selection, int ranks, int experts) {
  if (ranks <= 0 || experts % ranks != 0) throw std::invalid_argument("oracle: experts must be a multiple of ranks");
  const int local_experts = experts / ranks;
  Layout result;
  result.tokens_per_rank.assign(static_cast<std::size_t>(ranks), 0);
  result.tokens_per_expert.assign(static_cast<std::size_t>(experts), 0);
  result.token_in_rank.assign(static_cast<std::size_t>(selection.tokens * ranks), 0);
  for (std::int64_t t = 0; t < selection.tokens; ++t) {
    for (int k = 0; k < selection.topk; ++k) {
      const std::int64_t expert = selection.idx[index(t, selection.topk, k)];
      if (expert < 0 || expert >= experts) continue;
      ++result.tokens_per_expert[static_cast<std::size_t>(expert)];
      result.token_in_rank[index(t, ranks, expert / local_experts)] = 1;
    }
    for (int r = 0; r < ranks; ++r) {
      result.tokens_per_rank[static_cast<std::size_t>(r)] += result.token_in_rank[index(t, ranks, r)];
    }
  }
  return result;
}

Dispatched dispatch(std::span<const DispatchInput> inputs, int experts, int expert_alignment) {
  const int ranks = static_cast<int>(inputs.size());
  const int local_experts = experts / ranks;
  Dispatched result;
  result.received.resize(inputs.size());
  result.rank_prefix_matrix.assign(inputs.size() * inputs.size(), 0);
  for (const auto& input : inputs) {
    result.destination_row.emplace_back(static_cast<std::size_t>(input.tokens * ranks), -1);
  }
  for (int d = 0; d < ranks; ++d) {
    auto& to = result.received[static_cast<std::size_t>(d)];
    for (int s = 0; s < ranks; ++s) {
      const auto& from = inputs[static_cast<std::size_t>(s)];
      for (std::int64_t t = 0; t < from.tokens; ++t) {
        if (from.layout.token_in_rank[index(t, ranks, d)] == 0) continue;
        result.destination_row[static_cast<std::size_t>(s)][index(t, ranks, d)] = static_cast<std::int32_t>(to.rows);
        append_row(to, from, t, s, d * local_experts, local_experts);
      }
      result.rank_prefix_matrix[index(s, ranks, d)] = static_cast<std::int32_t>(to.rows);
    }
    for (int e = 0; e < local_experts; ++e) {
      int count = 0;
      for (const auto& from : inputs) {
        count += from.layout.tokens_per_expert[static_cast<std::size_t>(d * local_experts + e)];
      }
      to.tokens_per_expert.push_back(align_up(count, expert_alignment));
    }
  }
  return result;
}

void Combined::append(const Combined& rows) {
  x.insert(x.end(), rows.x.begin(), rows.x.end());
  sum.insert(sum.end(), rows.sum.begin(), rows.sum.end());
  tolerance.insert(tolerance.end(), rows.tolerance.begin(), rows.tolerance.end());
}

Combined combine_row(int owner, std::span<const std::vector<WeightedRow>> rows_of_ranks, std::int64_t hidden,
                     int ranks_per_node, std::span<const Row> biases) {
  const int ranks = static_cast<int>(rows_of_ranks.size());
  const int width = ranks_per_node;
  if (width < 0 || (width > 0 && ranks % width != 0)) {
    throw std::invalid_argument("oracle: ranks_per_node divides the number of ranks");
  }
  RowSum sum(hidden);
  for (const Row bias : biases) {
    if (!bias.empty()) sum.add(std::array{WeightedRow{bias}});
  }
  std::optional<RowSum> of_node;  // of a node whose ranks' parts come as one
  for (int rank = 0; rank < ranks; ++rank) {
    const bool together = width > 0 && rank / width != owner / width;
    const std::vector<WeightedRow>& rows = rows_of_ranks[static_cast<std::size_t>(rank)];
    if (!rows.empty()) {
      if (together && !of_node) of_node.emplace(hidden);
      (together ? *of_node : sum).add(rows);
    }
    if (of_node && (rank + 1) % width == 0) {
      sum.add_rounded(*of_node);
      of_node.reset();
    }
  }
  return sum.result();
}

std::vector<Combined> combine(const Dispatched& dispatched, std::span<const CombineInput> inputs, std::int64_t hidden,
                              int topk, int ranks_per_node) {
  const auto ranks = static_cast<std::int64_t>(inputs.size());
  const std::int64_t width = ranks_per_node == 0 ? ranks : ranks_per_node;
  const auto row_of = [hidden](const std::vector<std::uint16_t>& x, std::int64_t row) {
    return x.empty() ? Row() : Row(x).subspan(index(row, hidden, 0), static_cast<std::size_t>(hidden));
  };
  std::vector<Combined> results(inputs.size());
  for (std::int64_t owner = 0; owner < ranks; ++owner) {
    const auto& destination_row = dispatched.destination_row[static_cast<std::size_t>(owner)];
    const CombineInput& own = inputs[static_cast<std::size_t>(owner)];
    const std::int64_t tokens = static_cast<std::int64_t>(destination_row.size()) / ranks;
    Combined& result = results[static_cast<std::size_t>(owner)];
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::vector<std::vector<WeightedRow>> rows(inputs.size());
      std::vector<float> weights(static_cast<std::size_t>(topk), 0.0f);
      for (std::int64_t node = 0; node < ranks / width; ++node) {
        std::vector<float> of_node(weights.size(), 0.0f);
        std::vector<float>& sums = node == owner / width ? weights : of_node;
        for (std::int64_t d = node * width; d < (node + 1) * width; ++d) {
          const std::int32_t row = destination_row[index(t, ranks, d)];
          if (row < 0) continue;
          const CombineInput& from = inputs[static_cast<std::size_t>(d)];
          rows[static_cast<std::size_t>(d)] = {{row_of(from.x, row)}};
          for (std::size_t k = 0; k < weights.size(); ++k) {
            sums[k] += from.topk_weights[index(row, topk, static_cast<std::int64_t>(k))];
          }
        }
        for (std::size_t k = 0; k < weights.size(); ++k) weights[k] += of_node[k];
      }
      result.append(combine_row(static_cast<int>(owner), rows, hidden, static_cast<int>(width),
                                std::array{row_of(own.bias_0, t), row_of(own.bias_1, t)}));
      result.topk_weights.insert(result.topk_weights.end(), weights.begin(), weights.end());
    }
  }
  return results;
}

}  // namespace deep_ep::oracle
