// Rounding of the reference model in normal mode: results worked out by hand.
#include "oracle/normal.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "oracle/routing.hpp"

namespace deep_ep::oracle {
namespace {

DispatchInput input_of(Selection selection, int ranks, int experts, std::uint8_t tag) {
  DispatchInput input;
  input.tokens = selection.tokens;
  input.row_bytes = 2;
  for (std::int64_t t = 0; t < selection.tokens; ++t) {
    input.x.push_back(std::byte{tag});
    input.x.push_back(static_cast<std::byte>(t));
    input.scales.push_back(tag * 100u + static_cast<std::uint32_t>(t));
  }
  input.scales_per_row = 1;
  input.layout = layout(selection, ranks, experts);
  input.selection = std::move(selection);
  return input;
}

/// Two ranks, four experts, top-2. Rank 0: token 0 -> {0, 3}, token 1 -> {2, 2}. Rank 1: token 0 -> {-1, 1}.
std::vector<DispatchInput> two_ranks() {
  return {input_of({2, 2, {0, 3, 2, 2}, {0.5f, 0.25f, 1.0f, 2.0f}}, 2, 4, 1),
          input_of({1, 2, {-1, 1}, {4.0f, 8.0f}}, 2, 4, 2)};
}

TEST(OracleCombine, AddsBiasThenRanksAndRoundsOnce) {
  const Dispatched plan = dispatch(two_ranks(), 4, 1);
  const auto one = bf16_bits(1.0f);
  const auto small = bf16_bits(1.0f / 256);  // half of the last place of 1.0: two of them count, one alone is dropped
  std::vector<CombineInput> inputs(2);
  inputs[0] = {{small, one}, {1, 0, 0, 2}, {one, one}, {}};
  inputs[1] = {{small, bf16_bits(3.0f)}, {0, 4, 5, 6}, {}, {bf16_bits(0.5f)}};
  const auto result = combine(plan, inputs, 1, 2);
  EXPECT_EQ(bf16_value(result[0].x[0]), 1.0f + 2.0f / 256);  // rounding after each addition would give 1.0
  EXPECT_DOUBLE_EQ(result[0].sum[0], 1.0 + 2.0 / 256);
  EXPECT_EQ(bf16_value(result[0].x[1]), 4.0f);
  EXPECT_EQ(result[0].topk_weights, (std::vector<float>{1, 4, 5, 6}));
  EXPECT_EQ(bf16_value(result[1].x[0]), 1.5f);
  EXPECT_EQ(result[1].topk_weights, (std::vector<float>{0, 2}));
}

TEST(OracleBfloat16, RoundsToNearestEven) {
  EXPECT_EQ(bf16_bits(1.0f), 0x3f80);
  EXPECT_EQ(bf16_bits(1.0f + 1.0f / 256), 0x3f80);                  // a tie goes to the even neighbour below ...
  EXPECT_EQ(bf16_bits(1.0f + 3.0f / 256), 0x3f82);                  // ... or above
  EXPECT_EQ(bf16_bits(1.0f + 1.0f / 256 + 1e-6f), 0x3f81);          // just over the tie
  EXPECT_EQ(bf16_bits(std::numeric_limits<float>::max()), 0x7f80);  // rounds to infinity
  EXPECT_EQ(bf16_bits(-std::numeric_limits<float>::infinity()), 0xff80);
  EXPECT_EQ(bf16_bits(std::numeric_limits<float>::quiet_NaN()), 0x7fff);
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = bf16_value(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) continue;
    ASSERT_EQ(bf16_bits(value), bits);
  }
}

}  // namespace
}  // namespace deep_ep::oracle
