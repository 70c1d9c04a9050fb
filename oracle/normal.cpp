#include "oracle/normal.hpp"

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

CombinedRow combine_row(std::span<const Row> rows, std::int64_t hidden, Row bias_0, Row bias_1) {
  const auto width = static_cast<std::size_t>(hidden);
  std::vector<float> sums(width);
  CombinedRow result{{}, std::vector<double>(width)};
  for (std::size_t h = 0; h < width; ++h) {
    const float first = bias_0.empty() ? 0.0f : bf16_value(bias_0[h]);
    const float second = bias_1.empty() ? 0.0f : bf16_value(bias_1[h]);
    sums[h] = first + second;
    result.sum[h] = static_cast<double>(first) + static_cast<double>(second);
  }
  for (const Row row : rows) {
    for (std::size_t h = 0; h < width; ++h) {
      const float value = bf16_value(row[h]);
      sums[h] += value;
      result.sum[h] += static_cast<double>(value);
    }
  }
  result.x.reserve(width);
  for (const float sum : sums) result.x.push_back(bf16_bits(sum));
  return result;
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
      std::vector<Row> all, rows;  // what the ranks hold; and what comes in
      std::vector<CombinedRow> sums(static_cast<std::size_t>(ranks / width));
      std::vector<float> weights(static_cast<std::size_t>(topk), 0.0f);
      for (std::int64_t node = 0; node < ranks / width; ++node) {
        const bool own_node = node == owner / width;
        std::vector<Row> of_node;
        std::vector<float> node_weights(static_cast<std::size_t>(topk), 0.0f);
        std::vector<float>& weights_to = own_node ? weights : node_weights;
        for (std::int64_t d = node * width; d < (node + 1) * width; ++d) {
          const std::int32_t row = destination_row[index(t, ranks, d)];
          if (row < 0) continue;
          const CombineInput& from = inputs[static_cast<std::size_t>(d)];
          of_node.push_back(row_of(from.x, row));
          for (std::size_t k = 0; k < weights.size(); ++k) {
            weights_to[k] += from.topk_weights[index(row, topk, static_cast<std::int64_t>(k))];
          }
        }
        all.insert(all.end(), of_node.begin(), of_node.end());
        if (own_node) {
          rows.insert(rows.end(), of_node.begin(), of_node.end());
        } else if (!of_node.empty()) {
          CombinedRow& sum = sums[static_cast<std::size_t>(node)];
          sum = combine_row(of_node, hidden);
          rows.emplace_back(sum.x);
          for (std::size_t k = 0; k < weights.size(); ++k) weights[k] += node_weights[k];
        }
      }
      const Row bias_0 = row_of(own.bias_0, t), bias_1 = row_of(own.bias_1, t);
      const CombinedRow row = combine_row(rows, hidden, bias_0, bias_1);
      const CombinedRow exact = combine_row(all, hidden, bias_0, bias_1);
      result.x.insert(result.x.end(), row.x.begin(), row.x.end());
      result.sum.insert(result.sum.end(), exact.sum.begin(), exact.sum.end());
      result.topk_weights.insert(result.topk_weights.end(), weights.begin(), weights.end());
    }
  }
  return results;
}

}  // namespace deep_ep::oracle
