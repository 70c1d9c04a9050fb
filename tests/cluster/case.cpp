#include "tests/cluster/case.hpp"

#include <algorithm>

namespace deep_ep::test {
namespace {

// What the parts of a case draw their numbers from.
enum Part : std::uint64_t {
  kSelection = 1000,
  kPayload = 2000,
  kScales = 3000,
  kReturned = 4000,
  kWeights = 5000,
  kBias0 = 6000,
  kBias1 = 7000
};

std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  oracle::Random random(seed);
  std::vector<std::byte> result(count);
  for (auto& one : result) one = static_cast<std::byte>(random.next());
  return result;
}

oracle::DispatchInput make_input(const Shape& shape, const oracle::Selection& selection, std::uint64_t rank) {
  oracle::DispatchInput input;
  input.tokens = selection.tokens;
  input.row_bytes = shape.row_bytes();
  input.x = random_bytes(static_cast<std::size_t>(input.tokens) * input.row_bytes,
                         oracle::derive_seed(shape.seed, kPayload + rank));
  input.scales_per_row = shape.scales;
  oracle::Random random(oracle::derive_seed(shape.seed, kScales + rank));
  for (std::int64_t i = 0; i < input.tokens * shape.scales; ++i) {
    input.scales.push_back(static_cast<std::uint32_t>(random.next()));
  }
  input.layout = oracle::layout(selection, shape.ranks(), shape.experts());
  if (shape.with_topk) input.selection = selection;
  return input;
}

oracle::CombineInput make_returned(const Shape& shape, std::int64_t rows, std::uint64_t rank) {
  oracle::CombineInput input;
  input.x = random_terms(rows * shape.combine_hidden, oracle::derive_seed(shape.seed, kReturned + rank));
  if (shape.with_topk && shape.combine_weights) {
    oracle::Random random(oracle::derive_seed(shape.seed, kWeights + rank));
    for (std::int64_t i = 0; i < rows * shape.topk; ++i) {
      input.topk_weights.push_back(static_cast<float>(random.unit() * 2 - 1));
    }
  }
  const std::int64_t elements = shape.tokens[rank] * shape.combine_hidden;
  if (shape.bias_0) input.bias_0 = random_terms(elements, oracle::derive_seed(shape.seed, kBias0 + rank));
  if (shape.bias_1) input.bias_1 = random_terms(elements, oracle::derive_seed(shape.seed, kBias1 + rank));
  return input;
}

Case complete(Case one) {
  const Shape& shape = one.shape;
  one.dispatched = oracle::dispatch(one.inputs, shape.experts(), shape.alignment);
  for (int r = 0; r < shape.ranks(); ++r) {
    one.returned.push_back(make_returned(shape, one.rows(r), static_cast<std::uint64_t>(r)));
  }
  const bool weights = shape.with_topk && shape.combine_weights;
  one.combined = oracle::combine(one.dispatched, one.returned, shape.combine_hidden, weights ? shape.topk : 0,
                                 shape.ranks_per_node);
  return one;
}

Case make_inputs(const Shape& shape) {
  Case one;
  one.shape = shape;
  for (std::uint64_t r = 0; r < shape.tokens.size(); ++r) {
    one.selections.push_back(oracle::make_selection(shape.routing, shape.tokens[r], shape.topk, shape.experts(),
                                                    oracle::derive_seed(shape.seed, kSelection + r), shape.nodes()));
    one.inputs.push_back(make_input(shape, one.selections.back(), r));
  }
  return one;
}

}  // namespace

std::int64_t Shape::max_tokens() const { return *std::max_element(tokens.begin(), tokens.end()); }

std::string Shape::describe() const {
  std::string text = "seed=" + std::to_string(seed) + " ranks=" + std::to_string(ranks()) +
                     (ranks_per_node != 0 ? " ranks_per_node=" + std::to_string(ranks_per_node) : "") + " tokens=";
  for (const auto count : tokens) text += std::to_string(count) + ",";
  text.back() = ' ';
  text += "local_experts=" + std::to_string(local_experts) + " topk=" + std::to_string(topk) +
          (with_topk ? "" : " (layout only)") + " idx=" + deep_ep::name_of(idx_dtype) +
          " routing=" + oracle::name_of(routing) + " x=" + deep_ep::name_of(dtype) + "[" + std::to_string(hidden) + "]";
  if (scales > 0) {
    text += " scales=" + std::string(deep_ep::name_of(scale_dtype)) + "[" + std::to_string(scales) + "] layout " +
            std::to_string(static_cast<int>(scale_layout));
  }
  text += " alignment=" + std::to_string(alignment) + " combine_hidden=" + std::to_string(combine_hidden);
  text += std::string(combine_weights ? " weights" : "") + (bias_0 ? " bias_0" : "") + (bias_1 ? " bias_1" : "");
  return text;
}

Case make_case(const Shape& shape) { return complete(make_inputs(shape)); }

Case make_case(const Shape& shape, const std::vector<std::vector<std::uint8_t>>& membership) {
  Case one = make_inputs(shape);
  for (std::size_t r = 0; r < one.inputs.size(); ++r) {
    auto& layout = one.inputs[r].layout;
    layout.token_in_rank = membership[r];
    std::fill(layout.tokens_per_rank.begin(), layout.tokens_per_rank.end(), 0);
    for (std::size_t i = 0; i < membership[r].size(); ++i) {
      layout.tokens_per_rank[i % membership.size()] += membership[r][i];
    }
  }
  return complete(std::move(one));
}

Shape random_shape(oracle::Random& random, int ranks) {
  Shape shape;
  shape.seed = random.next();
  shape.tokens =
      oracle::make_token_counts(random.pick(oracle::kTokenCounts), ranks, 1 + random.below(40), random.next());
  shape.local_experts = static_cast<int>(1 + random.below(9));
  shape.topk = random.chance(0.1) ? 32 : static_cast<int>(1 + random.below(9));
  shape.with_topk = random.chance(0.8);
  shape.idx_dtype = random.chance(0.5) ? DType::int32 : DType::int64;
  shape.routing = random.pick(oracle::kRoutings);
  const DType types[] = {DType::bfloat16, DType::float8_e4m3, DType::uint8, DType::float32};
  shape.dtype = random.pick(types);
  const std::int64_t row_bytes = 16 * (random.chance(0.2) ? 1 + random.below(256) : 1 + random.below(40));
  shape.hidden = row_bytes / static_cast<std::int64_t>(size_of(shape.dtype));
  shape.scales = random.chance(0.5) ? 0 : static_cast<int>(1 + random.below(20));
  shape.scale_dtype = random.chance(0.5) ? DType::float32 : DType::int32;
  shape.scale_layout = random.pick(kScaleLayouts);
  shape.alignment = static_cast<int>(1 + random.below(20));
  shape.combine_hidden = 8 * (1 + random.below(60));
  shape.combine_weights = random.chance(0.5);
  shape.bias_0 = random.chance(0.4);
  shape.bias_1 = random.chance(0.3);
  return shape;
}

Shape random_shape_of_nodes(oracle::Random& random, int nodes, int width) {
  Shape shape = random_shape(random, nodes * width);
  shape.ranks_per_node = width;
  if (random.chance(0.3)) shape.routing = random.pick(oracle::kRoutingsOfGroups);
  if (random.chance(0.2)) {
    const auto empty = shape.tokens.begin() + random.below(nodes) * width;
    std::fill(empty, empty + width, 0);
  }
  return shape;
}

std::vector<std::int64_t> equal_tokens(int ranks, std::int64_t tokens) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(ranks), tokens);
}

std::vector<std::uint16_t> random_bf16(std::int64_t elements, std::uint64_t seed) {
  oracle::Random random(seed);
  std::vector<std::uint16_t> result(static_cast<std::size_t>(elements));
  for (auto& one : result) {
    const double value = (random.unit() * 2 - 1) * static_cast<double>(std::int64_t{1} << random.below(6));
    one = oracle::bf16_bits(static_cast<float>(value));
  }
  return result;
}

std::vector<std::uint16_t> random_terms(std::int64_t elements, std::uint64_t seed) {
  oracle::Random random(seed);
  std::vector<std::uint16_t> result(static_cast<std::size_t>(elements));
  for (auto& one : result) {
    const float size = random.chance(0.5) ? 0x1p24f : 4.0f;
    one = oracle::bf16_bits(random.chance(1.0 / 3) ? (random.chance(0.5) ? size : -size)
                                                   : static_cast<float>(random.unit() * 8 - 4));
  }
  return result;
}

}  // namespace deep_ep::test
