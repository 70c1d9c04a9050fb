#include "oracle/oracle.hpp"

#include <cmath>
#include <cstring>
#include <limits>
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

std::vector<Combined> combine(const Dispatched& dispatched, std::span<const CombineInput> inputs, std::int64_t hidden,
                              int topk) {
  const auto ranks = static_cast<std::int64_t>(inputs.size());
  std::vector<Combined> results(inputs.size());
  for (std::size_t owner = 0; owner < inputs.size(); ++owner) {
    const auto& rows = dispatched.destination_row[owner];
    const auto& own = inputs[owner];
    const std::int64_t tokens = static_cast<std::int64_t>(rows.size()) / ranks;
    auto& result = results[owner];
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        const auto at = index(t, hidden, h);
        const float bias_0 = own.bias_0.empty() ? 0.0f : bf16_value(own.bias_0[at]);
        const float bias_1 = own.bias_1.empty() ? 0.0f : bf16_value(own.bias_1[at]);
        float sum = bias_0 + bias_1;
        double exact = static_cast<double>(bias_0) + static_cast<double>(bias_1);
        for (std::int64_t d = 0; d < ranks; ++d) {
          const std::int32_t row = rows[index(t, ranks, d)];
          if (row < 0) continue;
          const float value = bf16_value(inputs[static_cast<std::size_t>(d)].x[index(row, hidden, h)]);
          sum += value;
          exact += static_cast<double>(value);
        }
        result.x.push_back(bf16_bits(sum));
        result.sum.push_back(exact);
      }
      for (int k = 0; k < topk; ++k) {
        float sum = 0.0f;
        for (std::int64_t d = 0; d < ranks; ++d) {
          const std::int32_t row = rows[index(t, ranks, d)];
          if (row >= 0) sum += inputs[static_cast<std::size_t>(d)].topk_weights[index(row, topk, k)];
        }
        result.topk_weights.push_back(sum);
      }
    }
  }
  return results;
}

float bf16_value(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

std::uint16_t bf16_bits(float value) {
  if (std::isnan(value)) return 0x7fff;
  std::uint32_t wide = 0;
  std::memcpy(&wide, &value, sizeof wide);
  const std::uint32_t kept = wide >> 16;
  const std::uint32_t dropped = wide & 0xffffu;
  const bool up = dropped > 0x8000u || (dropped == 0x8000u && (kept & 1u) != 0);
  return static_cast<std::uint16_t>(kept + (up ? 1u : 0u));
}

}  // namespace deep_ep::oracle
