// The reference model against results worked out by hand: a wrong oracle would make every other test worthless.
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

std::vector<std::byte> bytes(std::initializer_list<int> values) {
  std::vector<std::byte> result;
  for (const int value : values) result.push_back(static_cast<std::byte>(value));
  return result;
}

TEST(OracleLayout, CountsTokensOncePerRankAndEntriesPerExpert) {
  const Layout result = layout({3, 2, {0, 3, 2, 2, -1, 99}, std::vector<float>(6)}, 2, 4);
  EXPECT_EQ(result.tokens_per_rank, (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(result.tokens_per_expert, (std::vector<std::int32_t>{1, 0, 2, 1}));
  EXPECT_EQ(result.token_in_rank, (std::vector<std::uint8_t>{1, 1, 0, 1, 0, 0}));
}

TEST(OracleDispatch, OrdersRowsBySourceThenToken) {
  const auto inputs = two_ranks();
  const Dispatched result = dispatch(inputs, 4, 1);
  const Received& first = result.received[0];
  EXPECT_EQ(first.rows, 2);
  EXPECT_EQ(first.x, bytes({1, 0, 2, 0}));
  EXPECT_EQ(first.scales, (std::vector<std::uint32_t>{100, 200}));
  EXPECT_EQ(first.topk_idx, (std::vector<std::int64_t>{0, -1, -1, 1}));
  EXPECT_EQ(first.topk_weights, (std::vector<float>{0.5f, 0, 0, 8.0f}));
  EXPECT_EQ(first.src_rank, (std::vector<std::int32_t>{0, 1}));
  const Received& second = result.received[1];
  EXPECT_EQ(second.x, bytes({1, 0, 1, 1}));
  EXPECT_EQ(second.topk_idx, (std::vector<std::int64_t>{-1, 1, 0, 0}));
  EXPECT_EQ(second.src_idx, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(result.rank_prefix_matrix, (std::vector<std::int32_t>{1, 2, 2, 2}));
  EXPECT_EQ(result.destination_row[0], (std::vector<std::int32_t>{0, 0, -1, 1}));
  EXPECT_EQ(result.destination_row[1], (std::vector<std::int32_t>{1, -1}));
}

TEST(OracleDispatch, AlignsExpertCountsAndKeepsZero) {
  const Dispatched result = dispatch(two_ranks(), 4, 8);
  EXPECT_EQ(result.received[0].tokens_per_expert, (std::vector<int>{8, 8}));
  EXPECT_EQ(result.received[1].tokens_per_expert, (std::vector<int>{8, 8}));
  auto inputs = two_ranks();
  inputs[1].layout.tokens_per_expert[1] = 0;
  EXPECT_EQ(dispatch(inputs, 4, 8).received[0].tokens_per_expert, (std::vector<int>{8, 0}));
}

TEST(OracleDispatch, MembershipAloneDecides) {
  auto inputs = two_ranks();
  inputs[1].layout.token_in_rank = {0, 1};  // although expert 1 lives on rank 0
  const Dispatched result = dispatch(inputs, 4, 1);
  EXPECT_EQ(result.received[0].rows, 1);
  EXPECT_EQ(result.received[1].x, bytes({1, 0, 1, 1, 2, 0}));
  EXPECT_EQ(result.received[1].topk_idx[4], -1);
  EXPECT_EQ(result.received[1].topk_idx[5], -1);
}

TEST(OracleDispatch, InputsWithoutPayloadGiveTheSameRoutes) {
  const Dispatched whole = dispatch(two_ranks(), 4, 1);
  auto inputs = two_ranks();
  for (DispatchInput& input : inputs) {
    input.x.clear();
    input.scales.clear();
    input.row_bytes = 0;
    input.scales_per_row = 0;
  }
  const Dispatched routes = dispatch(inputs, 4, 1);
  EXPECT_EQ(routes.destination_row, whole.destination_row);
  EXPECT_EQ(routes.rank_prefix_matrix, whole.rank_prefix_matrix);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(routes.received[rank].src_rank, whole.received[rank].src_rank);
    EXPECT_EQ(routes.received[rank].src_idx, whole.received[rank].src_idx);
    EXPECT_EQ(routes.received[rank].topk_idx, whole.received[rank].topk_idx);
    EXPECT_TRUE(routes.received[rank].x.empty());
  }
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

TEST(OracleCombine, TokensSentNowhereGiveTheBias) {
  const std::vector<DispatchInput> inputs = {input_of({1, 1, {-1}, {1.0f}}, 1, 1, 0)};
  std::vector<CombineInput> back(1);
  EXPECT_EQ(combine(dispatch(inputs, 1, 1), back, 2, 0)[0].x, (std::vector<std::uint16_t>{0, 0}));
  back[0].bias_1 = {bf16_bits(2), bf16_bits(-7)};
  EXPECT_EQ(combine(dispatch(inputs, 1, 1), back, 2, 0)[0].x, back[0].bias_1);
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
