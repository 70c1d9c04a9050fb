// Rounding of the reference model in low-latency calls: results worked out by hand. (Everything else of it, calls on
// all ranks and references in Python would not agree with.)
#include "oracle/low_latency.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <stdexcept>

#include "oracle/fp8.hpp"
#include "oracle/routing.hpp"

namespace deep_ep::oracle {
namespace {

TEST(OracleE4m3, ConvertsByHand) {
  EXPECT_EQ(e4m3_bits(0.0f), 0x00);
  EXPECT_EQ(e4m3_bits(-0.0f), 0x80);
  EXPECT_EQ(e4m3_bits(1.0f), 0x38);
  EXPECT_EQ(e4m3_bits(-1.5f), 0xbc);
  EXPECT_EQ(e4m3_bits(448.0f), 0x7e);
  EXPECT_EQ(e4m3_bits(1e9f), 0x7e);
  EXPECT_EQ(e4m3_bits(17.0f), 0x58);      // a tie, to the even neighbour below
  EXPECT_EQ(e4m3_bits(19.0f), 0x5a);      // ... and above
  EXPECT_EQ(e4m3_bits(15.9f), 0x58);      // carries into the next octave
  EXPECT_EQ(e4m3_bits(0x1p-9f), 0x01);    // smallest subnormal
  EXPECT_EQ(e4m3_bits(0x1p-10f), 0x00);   // a tie with zero
  EXPECT_EQ(e4m3_bits(0x1.fp-7f), 0x08);  // rounds up to the smallest normal
  EXPECT_EQ(e4m3_bits(0x1.8p-10f), 0x01);
}

std::vector<std::uint16_t> bf16(std::initializer_list<float> values, std::size_t width = 128) {
  std::vector<std::uint16_t> result;
  for (const float value : values) result.push_back(bf16_bits(value));
  result.resize(width, bf16_bits(0.0f));
  return result;
}

TEST(OracleFp8, RoundedScalesAreTheNextPowerOfTwo) {
  std::vector<std::uint8_t> out(128);
  EXPECT_EQ(cast_fp8(bf16({448.0f}), true, out), 1.0f) << "exact powers stay";
  EXPECT_EQ(out[0], 0x7e);
  EXPECT_EQ(cast_fp8(bf16({450.0f}), true, out), 2.0f);
  EXPECT_EQ(e4m3_value(out[0]), 224.0f);  // 225 rounds to 224
  EXPECT_EQ(cast_fp8(bf16({1.0f}), true, out), 0x1p-8f);
  EXPECT_EQ(e4m3_value(out[0]), 256.0f);
}

TEST(OracleFp8, PacksExponentsFromTheLowestByte) {
  EXPECT_EQ(ue8m0_bits(1.0f), 127);
  EXPECT_EQ(pack_ue8m0(std::vector<float>{1.0f, 2.0f, 0.5f, 0x1p-8f}), std::bit_cast<std::int32_t>(0x777e807fu));
  EXPECT_THROW(ue8m0_bits(3.0f), std::invalid_argument);
}

/// What docs/low-latency.md says of rows in FP8.
TEST(OracleFp8, ErrorOfACastValue) {
  Random random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::uint16_t> block;
    double amax = 1e-4;
    const double largest = std::ldexp(1.0, static_cast<int>(random.below(60)) - 40);
    for (int i = 0; i < kFp8Block; ++i) {
      const double value = largest * (2 * random.unit() - 1) * std::exp2(-30 * random.unit());
      block.push_back(bf16_bits(static_cast<float>(value)));
      amax = std::max(amax, std::fabs(static_cast<double>(bf16_value(block.back()))));
    }
    std::vector<std::uint8_t> cast(block.size());
    const float scale = cast_fp8(block, false, cast);
    for (std::size_t i = 0; i < block.size(); ++i) {
      const auto value = static_cast<double>(bf16_value(block[i]));
      const double error = std::fabs(static_cast<double>(e4m3_value(cast[i]) * scale) - value);
      const double bound = std::max(std::fabs(value) / 16, amax * (0x1p-10 / 448));
      ASSERT_LE(error, bound * (1 + 0x1p-16)) << value << " beside " << amax;
    }
  }
}

TEST(OracleLowLatencyCombine, RoundsEachRanksPartAndTheSum) {
  // Three ranks with an expert each; rows 1, 2^-8, 2^-8 of one token: half of the last place of 1.0 each.
  const LowLatencyShape shape{.ranks = 3, .experts = 6, .hidden = 128, .max_tokens = 1};
  std::vector<LowLatencyInput> inputs(3);
  for (auto& input : inputs) input = {{0, 4, {}, {}}, {}};
  inputs[0] = {{1, 4, {0, 1, 2, 4}, {1, 1, 1, 1}}, std::vector<std::uint16_t>(128, bf16_bits(1.0f))};
  const auto plan = low_latency_dispatch(shape, inputs, RowFormat::bf16);
  std::vector<LowLatencyCombineInput> rows(3);
  for (std::size_t r = 0; r < 3; ++r) {
    rows[r].selection = inputs[r].selection;
    rows[r].x.assign(2 * 3 * 128, bf16_bits(0x1p-8f));
  }
  std::fill_n(rows[0].x.begin(), 128, bf16_bits(1.0f));
  const auto result = low_latency_combine(plan, rows);
  // Rank 0: 1 + 2^-8 is a tie and rounds down to 1. Owner: 1 + 2^-8 + 2^-8 = 1 + 2^-7, which bfloat16 has.
  EXPECT_EQ(bf16_value(result[0].x[0]), 1.0f + 0x1p-7f);
  EXPECT_DOUBLE_EQ(result[0].sum[0], 1.0 + 3 * 0x1p-8);
  EXPECT_LE(std::fabs(static_cast<double>(bf16_value(result[0].x[0])) - result[0].sum[0]), result[0].tolerance[0]);
}

/// Ranks with an expert each, whose parts of the one token of rank `owner` are `values`; 0: the expert is not selected.
float combine_parts(const std::vector<float>& values, std::size_t owner, int ranks_per_node) {
  const LowLatencyShape shape{.ranks = static_cast<int>(values.size()),
                              .experts = static_cast<int>(values.size()),
                              .hidden = 128,
                              .max_tokens = 1};
  const auto topk = static_cast<int>(values.size());
  std::vector<LowLatencyInput> inputs(values.size(), LowLatencyInput{{0, topk, {}, {}}, {}});
  inputs[owner] = {{1, topk, {}, std::vector<float>(values.size(), 1.0f)}, bf16({})};
  for (std::size_t r = 0; r < values.size(); ++r) {
    inputs[owner].selection.idx.push_back(values[r] != 0.0f ? static_cast<std::int64_t>(r) : -1);
  }
  const auto plan = low_latency_dispatch(shape, inputs, RowFormat::bf16);
  std::vector<LowLatencyCombineInput> rows(values.size());
  for (std::size_t r = 0; r < values.size(); ++r) {
    rows[r] = {std::vector<std::uint16_t>(values.size() * 128, bf16_bits(values[r])), inputs[r].selection};
  }
  const LowLatencyCombined result = low_latency_combine(plan, rows, {.ranks_per_node = ranks_per_node})[owner];
  const auto value = static_cast<double>(bf16_value(result.x[0]));
  EXPECT_LE(std::fabs(value - result.sum[0]), result.tolerance[0]);
  return bf16_value(result.x[0]);
}

TEST(OracleLowLatencyCombine, ByRailsAnotherNodesPartIsRounded) {
  // In units of 2^-8, where bfloat16 has even numbers only from 256 to 512.
  const std::vector<float> parts = {1.0f, 0x1p-8f, 0x1p-8f, 0.0f};
  EXPECT_EQ(combine_parts(parts, 3, 0), 1.0f + 0x1p-7f) << "256 + 1 + 1";
  EXPECT_EQ(combine_parts(parts, 3, 2), 1.0f) << "256 + 1, a tie, is 256; 256 + 1 is so again";
  EXPECT_EQ(combine_parts(parts, 0, 2), 1.0f + 0x1p-7f) << "the owner's own node adds without rounding: 256 + 1, + 1";
  EXPECT_EQ(combine_parts(parts, 3, 1), 1.0f + 0x1p-7f) << "nodes of one rank: parts are rounded already";
  EXPECT_EQ(combine_parts(parts, 3, 4), 1.0f + 0x1p-7f) << "one node";
}

}  // namespace
}  // namespace deep_ep::oracle
