// Cases of the second interface's combine: what every rank holds, made without a dispatch, and what must come of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "deep_ep/elastic.hpp"
#include "oracle/bf16.hpp"
#include "oracle/random.hpp"
#include "tests/cluster/cluster.hpp"

namespace deep_ep::test {

struct ElasticShape {
  std::vector<std::int64_t> tokens;  ///< of each rank
  int local_experts = 4;
  int topk = 4;
  std::int64_t hidden = 72;
  int max_tokens = 40;
  bool expanded = true;
  bool each_selection = false;
  bool weights = false;
  int biases = 0;  ///< bit 0, bit 1
  /// Some rows have lost a selection's row, or name one that x does not have; and there are rows of a program's own, of
  /// no rank or of no token.
  bool gaps = false;
  std::uint64_t seed = 1;

  int ranks() const { return static_cast<int>(tokens.size()); }
};

/// What one rank gives and what it must get.
struct ElasticSide {
  std::vector<std::int64_t> topk_idx;        // [T, K]
  std::vector<std::int32_t> rows_at_owners;  // [T, K]
  std::vector<std::int32_t> metadata;        // [N + 2, K + 2]: two rows that are not valid
  std::vector<std::int32_t> source_ends;     // [R]
  std::vector<std::uint16_t> x;              // NaN in rows that nobody names
  std::vector<float> weights;
  std::vector<std::uint16_t> bias[2];
  std::vector<std::uint16_t> sums;
  std::vector<float> weights_back;
};

struct ElasticCase {
  ElasticShape shape;
  std::vector<ElasticSide> sides;
};

inline ElasticCase make_elastic_case(const ElasticShape& shape) {
  constexpr std::uint16_t kNan = 0x7fc1;
  constexpr std::int64_t kUnused = 3;  // rows of x around each row that is used
  oracle::Random random(shape.seed);
  const int ranks = shape.ranks(), topk = shape.topk;
  const auto k_of = [&](std::int64_t token, int k) { return static_cast<std::size_t>(token * topk + k); };
  ElasticCase one{shape, std::vector<ElasticSide>(static_cast<std::size_t>(ranks))};
  // Sums of the large ones lose the small ones, so that they tell in which order they were added.
  const auto value = [&] {
    const float size = random.chance(0.3) ? 0x1p24f : 4.0f;
    return oracle::bf16_bits(random.chance(0.3) ? (random.chance(0.5) ? size : -size)
                                                : static_cast<float>(random.unit() * 8 - 4));
  };
  for (int rank = 0; rank < ranks; ++rank) {
    ElasticSide& side = one.sides[std::size_t(rank)];
    const std::int64_t tokens = shape.tokens[std::size_t(rank)];
    for (std::int64_t i = 0; i < tokens * topk; ++i) {
      side.topk_idx.push_back(random.chance(0.2) ? -1 - random.below(3) : random.below(ranks * shape.local_experts));
    }
    side.rows_at_owners.assign(side.topk_idx.size(), -1);
    for (auto& bias : side.bias) {
      for (std::int64_t i = 0; i < tokens * shape.hidden; ++i) bias.push_back(value());
    }
  }
  const auto rank_of = [&](std::int64_t index) { return index < 0 ? -1 : int(index) / shape.local_experts; };

  // What each expert's rank received, and the rows of x.
  std::vector<std::vector<std::vector<std::int32_t>>> slots(one.sides.size());  // of rank, of row, of selection
  for (int rank = 0; rank < ranks; ++rank) {
    ElasticSide& side = one.sides[std::size_t(rank)];
    std::int32_t next_slot = kUnused;
    for (int source = 0; source < ranks; ++source) {
      ElasticSide& from = one.sides[std::size_t(source)];
      for (std::int64_t token = 0; token < shape.tokens[std::size_t(source)]; ++token) {
        int last = -1;
        std::vector<std::int32_t> mine(std::size_t(topk), -1);
        for (int k = 0; k < topk; ++k) {
          if (rank_of(from.topk_idx[k_of(token, k)]) != rank) continue;
          last = k;
          from.rows_at_owners[k_of(token, k)] = static_cast<std::int32_t>(slots[std::size_t(rank)].size());
          mine[std::size_t(k)] = next_slot;
          next_slot += 1 + static_cast<std::int32_t>(random.below(kUnused));
          if (shape.gaps && random.chance(0.2)) mine[std::size_t(k)] = random.chance(0.5) ? -1 : INT32_MAX;
        }
        if (last < 0) continue;
        side.metadata.push_back(static_cast<std::int32_t>(source * shape.max_tokens + token));
        side.metadata.push_back(static_cast<std::int32_t>(source * topk + last));
        side.metadata.insert(side.metadata.end(), mine.begin(), mine.end());
        slots[std::size_t(rank)].push_back(mine);
      }
      const std::int32_t origins[] = {-1, ranks * shape.max_tokens, (source + 1) * shape.max_tokens - 1};
      // As of tokens that there are, no two ranks have the same selection.
      const bool has_room = shape.tokens[std::size_t(source)] < shape.max_tokens && rank < topk;
      for (int i = 0; shape.gaps && i < (has_room ? 3 : 2); ++i) {
        auto& own = slots[std::size_t(rank)].emplace_back(std::size_t(topk), -1);
        own[std::size_t(rank % topk)] = next_slot++;
        side.metadata.insert(side.metadata.end(), {origins[i], rank % topk});
        side.metadata.insert(side.metadata.end(), own.begin(), own.end());
      }
      side.source_ends.push_back(static_cast<std::int32_t>(slots[std::size_t(rank)].size()));
    }
    for (int i = 0; i < 2 * (topk + 2); ++i) side.metadata.push_back(i % (topk + 2) == 0 ? 0 : 1);
    const std::int64_t rows =
        shape.expanded ? next_slot + kUnused : static_cast<std::int64_t>(slots[std::size_t(rank)].size()) + 2;
    side.x.assign(static_cast<std::size_t>(rows * shape.hidden), kNan);
    const auto fill = [&](std::int64_t row) {
      for (std::int64_t h = 0; h < shape.hidden; ++h) side.x[std::size_t(row * shape.hidden + h)] = value();
    };
    for (std::size_t row = 0; row < slots[std::size_t(rank)].size(); ++row) {
      if (!shape.expanded) fill(static_cast<std::int64_t>(row));
      for (const std::int32_t slot : slots[std::size_t(rank)][row]) {
        if (shape.expanded && slot >= 0 && slot < rows) fill(slot);
      }
    }
    const std::int64_t weights = shape.expanded ? rows : rows * topk;
    for (std::int64_t i = 0; i < weights; ++i) side.weights.push_back(static_cast<float>(random.unit()));
  }

  // What comes back.
  for (int owner = 0; owner < ranks; ++owner) {
    ElasticSide& side = one.sides[std::size_t(owner)];
    const auto row_of = [&](const ElasticSide& at, std::int64_t row, std::int64_t h) {
      return oracle::bf16_value(at.x[std::size_t(row * shape.hidden + h)]);
    };
    for (std::int64_t token = 0; token < shape.tokens[std::size_t(owner)]; ++token) {
      for (std::int64_t h = 0; h < shape.hidden; ++h) {
        float sum = 0;
        for (int i = 0; i < 2; ++i) {
          if ((shape.biases >> i & 1) != 0)
            sum += oracle::bf16_value(side.bias[i][std::size_t(token * shape.hidden + h)]);
        }
        for (int k = 0; k < topk; ++k) {
          const int rank = rank_of(side.topk_idx[k_of(token, k)]);
          if (rank < 0) continue;
          const ElasticSide& at = one.sides[std::size_t(rank)];
          const std::int32_t row = side.rows_at_owners[k_of(token, k)];
          const auto& mine = slots[std::size_t(rank)][std::size_t(row)];
          const auto there = [&](std::int32_t slot) {
            return slot >= 0 && slot < std::int64_t(at.x.size()) / shape.hidden;
          };
          if (shape.each_selection) {
            if (there(mine[std::size_t(k)])) sum += row_of(at, mine[std::size_t(k)], h);
            continue;
          }
          bool later = false;
          for (int next = k + 1; next < topk; ++next) later |= rank_of(side.topk_idx[k_of(token, next)]) == rank;
          if (later) continue;
          if (!shape.expanded) {
            sum += row_of(at, row, h);
            continue;
          }
          float of_rank = 0;
          for (const std::int32_t slot : mine) of_rank += there(slot) ? row_of(at, slot, h) : 0;
          sum += oracle::bf16_value(oracle::bf16_bits(of_rank));
        }
        side.sums.push_back(oracle::bf16_bits(sum));
      }
      for (int k = 0; k < topk; ++k) {
        const int rank = rank_of(side.topk_idx[k_of(token, k)]);
        float weight = 0;
        if (rank >= 0) {
          const ElasticSide& at = one.sides[std::size_t(rank)];
          const std::int32_t row = side.rows_at_owners[k_of(token, k)];
          const std::int32_t slot = slots[std::size_t(rank)][std::size_t(row)][std::size_t(k)];
          if (!shape.expanded) weight = at.weights[k_of(row, k)];
          if (shape.expanded && slot >= 0 && std::size_t(slot) < at.weights.size())
            weight = at.weights[std::size_t(slot)];
        }
        side.weights_back.push_back(weight);
      }
    }
  }
  return one;
}

/// The arguments of this rank's call, in its memory.
inline ElasticCombineArguments upload_elastic(Rank& rank, const ElasticCase& one) {
  const ElasticShape& shape = one.shape;
  const ElasticSide& side = one.sides[std::size_t(rank.rank())];
  const std::int64_t tokens = shape.tokens[std::size_t(rank.rank())], topk = shape.topk;
  const auto received = static_cast<std::int64_t>(side.metadata.size()) / (topk + 2);
  const auto rows = static_cast<std::int64_t>(side.x.size()) / shape.hidden;
  ElasticCombineArguments call;
  call.x = rank.upload(side.x, DType::bfloat16, {rows, shape.hidden});
  call.metadata = rank.upload(side.metadata, DType::int32, {received, topk + 2});
  call.source_ends = rank.upload(side.source_ends, DType::int32, {shape.ranks()});
  call.topk_idx = rank.upload(side.topk_idx, DType::int64, {tokens, topk});
  call.rows_at_owners = rank.upload(side.rows_at_owners, DType::int32, {tokens, topk});
  call.num_experts = shape.ranks() * shape.local_experts;
  call.max_tokens = shape.max_tokens;
  call.expanded = shape.expanded;
  call.each_selection = shape.each_selection;
  if (shape.weights && shape.expanded) call.topk_weights = rank.upload(side.weights, DType::float32, {rows});
  if (shape.weights && !shape.expanded) call.topk_weights = rank.upload(side.weights, DType::float32, {rows, topk});
  if ((shape.biases & 1) != 0) call.bias_0 = rank.upload(side.bias[0], DType::bfloat16, {tokens, shape.hidden});
  if ((shape.biases & 2) != 0) call.bias_1 = rank.upload(side.bias[1], DType::bfloat16, {tokens, shape.hidden});
  return call;
}

inline void check_elastic(Rank& rank, const ElasticCase& one, const CombineResult& result) {
  const ElasticSide& side = one.sides[std::size_t(rank.rank())];
  require_same(side.sums, rank.download<std::uint16_t>(result.combined_x.view()), "combined_x", one.shape.hidden);
  require(result.combined_topk_weights.has_value() == one.shape.weights, "combined_topk_weights");
  if (!one.shape.weights) return;
  require_same(side.weights_back, rank.download<float>(result.combined_topk_weights->view()), "combined_topk_weights",
               one.shape.topk);
}

}  // namespace deep_ep::test
