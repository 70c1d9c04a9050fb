// The second interface's combine after a dispatch of a case: what the experts made, and what must come of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "oracle/bf16.hpp"
#include "tests/buffer/elastic/dispatch_case.hpp"
#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep::test {

/// What one rank gives and what it must get.
struct ElasticSide {
  std::vector<std::int32_t> slots;        // [N, K]: with `expand` the row of x of each selection
  std::vector<std::int32_t> own_origins;  // of rows of the program's own, behind those
  std::vector<std::uint16_t> x;           // [rows, hidden]: NaN in rows that nobody names
  std::vector<float> weights;
  std::vector<std::uint16_t> sums;
  std::vector<float> weights_back;
};

struct ElasticCase {
  Case one;
  ElasticKind kind;
  std::vector<ElasticSide> sides{};
};

inline ElasticSide make_elastic_side(const ElasticCase& whole, int rank) {
  const Shape& shape = whole.one.shape;
  const int topk = shape.topk, ranks = shape.ranks();
  const ElasticLayout layout = layout_of(whole.one, rank, whole.kind.expand);
  oracle::Random random(oracle::derive_seed(shape.seed, index(100 + rank)));
  ElasticSide side;
  side.slots = layout.slots;
  auto rows = static_cast<std::int32_t>(layout.row_of.size());
  if (whole.kind.gaps) {
    for (std::int32_t& slot : side.slots) {
      if (slot >= 0 && random.chance(0.2)) slot = random.chance(0.5) ? -1 : INT32_MAX;
    }
    const int most = most_tokens(whole.one);
    side.own_origins = {-1, INT32_MAX, ranks * most};
    // As of tokens that there are, no two ranks have the same selection.
    if (rank < topk) side.own_origins.push_back(ranks * most - 1);
    for (std::size_t i = 0; i < side.own_origins.size(); ++i) {
      side.slots.resize(side.slots.size() + index(topk), -1);
      side.slots[side.slots.size() - index(topk - rank % topk)] = rows++;
    }
  }
  side.x = random_terms((rows + 2) * shape.combine_hidden, random.next());
  for (std::int32_t row = 0; whole.kind.expand && row < rows; ++row) {
    if (std::ranges::count(side.slots, row) > 0) continue;
    std::fill_n(side.x.begin() + row * shape.combine_hidden, shape.combine_hidden, std::uint16_t{0x7fc1});
  }
  side.weights.resize(index((rows + 2) * (whole.kind.expand ? 1 : topk)));
  for (float& weight : side.weights) weight = static_cast<float>(random.unit());
  return side;
}

inline ElasticCase make_elastic_case(Case one, const ElasticKind& kind) {
  ElasticCase whole{std::move(one), kind};
  const Shape& shape = whole.one.shape;
  const int topk = shape.topk, ranks = shape.ranks();
  const std::int64_t hidden = shape.combine_hidden;
  for (int rank = 0; rank < ranks; ++rank) whole.sides.push_back(make_elastic_side(whole, rank));
  const auto value_of = [&](int rank, std::int32_t row, std::int64_t h) {
    const std::vector<std::uint16_t>& x = whole.sides[index(rank)].x;
    const std::size_t at = index(row * hidden + h);
    return row >= 0 && at < x.size() ? oracle::bf16_value(x[at]) : 0.0f;
  };
  for (int owner = 0; owner < ranks; ++owner) {
    ElasticSide& side = whole.sides[index(owner)];
    const oracle::CombineInput& given = whole.one.returned[index(owner)];
    for (std::int64_t token = 0; token < shape.tokens[index(owner)]; ++token) {
      std::vector<int> rank_of(index(topk), -1);  // of each selection's expert
      std::vector<std::int64_t> row_of(index(topk));
      for (int k = 0; k < topk; ++k) {
        const std::int64_t expert = whole.one.selections[index(owner)].idx[index(token * topk + k)];
        if (expert < 0 || expert >= shape.experts()) continue;
        rank_of[index(k)] = static_cast<int>(expert) / shape.local_experts;
        row_of[index(k)] = whole.one.dispatched.destination_row[index(owner)][index(token * ranks + rank_of[index(k)])];
      }
      const auto slot_of = [&](int k, int of) {
        return whole.sides[index(rank_of[index(k)])].slots[index(row_of[index(k)] * topk + of)];
      };
      for (std::int64_t h = 0; h < hidden; ++h) {
        float sum = 0;
        for (const auto* bias : {&given.bias_0, &given.bias_1}) {
          if (!bias->empty()) sum += oracle::bf16_value((*bias)[index(token * hidden + h)]);
        }
        for (int k = 0; k < topk; ++k) {
          const int rank = rank_of[index(k)];
          if (rank < 0) continue;
          if (kind.each_selection) {
            sum += value_of(rank, slot_of(k, k), h);
          } else if (std::find(rank_of.begin() + k + 1, rank_of.end(), rank) == rank_of.end()) {  // the rank's last one
            float part = kind.expand ? 0 : value_of(rank, static_cast<std::int32_t>(row_of[index(k)]), h);
            for (int other = 0; kind.expand && other < topk; ++other) part += value_of(rank, slot_of(k, other), h);
            sum += oracle::bf16_value(oracle::bf16_bits(part));
          }
        }
        side.sums.push_back(oracle::bf16_bits(sum));
      }
      for (int k = 0; k < topk; ++k) {
        side.weights_back.push_back(0);
        if (rank_of[index(k)] < 0) continue;
        const std::int64_t at = kind.expand ? slot_of(k, k) : row_of[index(k)] * topk + k;
        const std::vector<float>& weights = whole.sides[index(rank_of[index(k)])].weights;
        if (at >= 0 && index(at) < weights.size()) side.weights_back.back() = weights[index(at)];
      }
    }
  }
  return whole;
}

/// The arguments of this rank's call, in its memory, after that dispatch.
inline ElasticCombineArguments upload_elastic(Rank& rank, const ElasticCase& whole,
                                              const ElasticDispatchArguments& dispatch,
                                              const ElasticDispatchHandle& handle) {
  const ElasticSide& side = whole.sides[index(rank.rank())];
  const Shape& shape = whole.one.shape;
  const std::int64_t topk = shape.topk, tokens = shape.tokens[index(rank.rank())];
  auto ends = rank.download<std::int32_t>(handle.source_ends.view());
  auto metadata = rank.download<std::int32_t>(handle.metadata.view());
  metadata.resize(index(ends.back() * (topk + 2)));
  for (const std::int32_t origin : side.own_origins) {  // they count as of the last rank
    metadata.insert(metadata.end(), {origin, static_cast<std::int32_t>(rank.rank() % topk)});
    metadata.resize(metadata.size() + index(topk));
    ++ends.back();
  }
  for (std::int64_t at = 0; at < ends.back() * topk; ++at) {
    metadata[index(at / topk * (topk + 2) + 2 + at % topk)] = side.slots[index(at)];
  }
  for (int i = 0; i < 2 * (topk + 2); ++i) metadata.push_back(i % (topk + 2) == 0 ? 0 : 1);  // two that are not valid
  const auto rows = static_cast<std::int64_t>(side.x.size()) / shape.combine_hidden;
  ElasticCombineArguments call;
  call.x = rank.upload(side.x, DType::bfloat16, {rows, shape.combine_hidden});
  call.metadata = rank.upload(metadata, DType::int32, {ends.back() + 2, topk + 2});
  call.source_ends = rank.upload(ends, DType::int32, {shape.ranks()});
  call.topk_idx = dispatch.topk_idx;
  call.own_rows = handle.own_rows.view();
  call.num_experts = dispatch.num_experts;
  call.max_tokens = dispatch.max_tokens;
  call.expanded = whole.kind.expand;
  call.each_selection = whole.kind.each_selection;
  const bool expanded = whole.kind.expand;
  if (whole.kind.combine_weights && expanded) call.topk_weights = rank.upload(side.weights, DType::float32, {rows});
  if (whole.kind.combine_weights && !expanded) {
    call.topk_weights = rank.upload(side.weights, DType::float32, {rows, topk});
  }
  const oracle::CombineInput& given = whole.one.returned[index(rank.rank())];
  if (shape.bias_0) call.bias_0 = rank.upload(given.bias_0, DType::bfloat16, {tokens, shape.combine_hidden});
  if (shape.bias_1) call.bias_1 = rank.upload(given.bias_1, DType::bfloat16, {tokens, shape.combine_hidden});
  return call;
}

/// The same after a dispatch of its own, whose result outlives the call.
inline ElasticCombineArguments dispatch_for_combine(Rank& rank, Buffer& buffer, const ElasticCase& whole,
                                                    ElasticDispatchResult& result) {
  const ElasticDispatchArguments dispatch = elastic_arguments(rank, whole.one, whole.kind);
  result = buffer.dispatch_elastic(dispatch, rank.call());
  return upload_elastic(rank, whole, dispatch, result.handle);
}

inline void check_elastic(Rank& rank, const ElasticCase& whole, const CombineResult& result) {
  const ElasticSide& side = whole.sides[index(rank.rank())];
  require_same(side.sums, rank.download<std::uint16_t>(result.combined_x.view()), "combined_x",
               whole.one.shape.combine_hidden);
  require(result.combined_topk_weights.has_value() == whole.kind.combine_weights, "combined_topk_weights");
  if (!whole.kind.combine_weights) return;
  require_same(side.weights_back, rank.download<float>(result.combined_topk_weights->view()), "combined_topk_weights",
               whole.one.shape.topk);
}

}  // namespace deep_ep::test
