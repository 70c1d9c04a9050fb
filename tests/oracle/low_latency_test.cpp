// The reference model of the low-latency calls against results worked out by hand.
#include "oracle/low_latency.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
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

TEST(OracleE4m3, EveryCodeComesBack) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    ASSERT_EQ(e4m3_bits(e4m3_value(static_cast<std::uint8_t>(code))), code);
  }
}

std::vector<std::uint16_t> bf16(std::initializer_list<float> values, std::size_t width = 128) {
  std::vector<std::uint16_t> result;
  for (const float value : values) result.push_back(bf16_bits(value));
  result.resize(width, bf16_bits(0.0f));
  return result;
}

TEST(OracleFp8, TheLargestValueMapsTo448) {
  std::vector<std::uint8_t> out(128);
  const float scale = cast_fp8(bf16({-3.5f, 1.75f}), false, out);
  EXPECT_EQ(scale, 3.5f * (1.0f / 448.0f));
  EXPECT_EQ(out[0], 0xfe);
  EXPECT_EQ(e4m3_value(out[1]), 224.0f);
  EXPECT_EQ(out[2], 0);
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

TEST(OracleFp8, ZerosHaveTheSmallestScale) {
  std::vector<std::uint8_t> out(128, 0xff);
  EXPECT_EQ(cast_fp8(bf16({}), false, out), 1e-4f * (1.0f / 448.0f));
  EXPECT_EQ(out, std::vector<std::uint8_t>(128, 0));
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

// Two ranks, four experts, H = 128, M = 2. Rank 0: token 0 -> {0, 3}, token 1 -> {2, 2}. Rank 1: token 0 -> {-1, 3}.
constexpr LowLatencyShape kShape{.ranks = 2, .experts = 4, .hidden = 128, .max_tokens = 2};

std::vector<LowLatencyInput> inputs_of_two_ranks() {
  const auto rows = [](std::initializer_list<float> values) {
    std::vector<std::uint16_t> x;
    for (const float value : values) x.insert(x.end(), 128, bf16_bits(value));
    return x;
  };
  return {{{2, 2, {0, 3, 2, 2}, {0.5f, 0.25f, 1.0f, 2.0f}}, rows({1, 2})}, {{1, 2, {-1, 3}, {4.0f, 8.0f}}, rows({3})}};
}

std::int64_t range(std::int64_t begin, std::int64_t count) { return begin << 32 | count; }

float value_at(const LowLatencyReceived& received, std::int64_t row) {
  return bf16_value(reinterpret_cast<const std::uint16_t*>(received.x.data())[row * kShape.hidden]);
}

TEST(OracleLowLatencyDispatch, ExpertsGetTheirRowsBySourceAndToken) {
  const auto result = low_latency_dispatch(kShape, inputs_of_two_ranks(), RowFormat::bf16);
  const LowLatencyReceived& first = result.received[0];
  EXPECT_EQ(first.count, (std::vector<std::int32_t>{1, 0}));
  EXPECT_EQ(first.layout_range, (std::vector<std::int64_t>{range(0, 1), range(1, 0), range(0, 0), range(0, 0)}));
  EXPECT_EQ(first.src_info, (std::vector<std::int32_t>{0, -1, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(value_at(first, 0), 1.0f);
  const LowLatencyReceived& second = result.received[1];
  EXPECT_EQ(second.count, (std::vector<std::int32_t>{2, 2}));
  EXPECT_EQ(second.layout_range, (std::vector<std::int64_t>{range(0, 2), range(2, 0), range(0, 1), range(1, 1)}));
  EXPECT_EQ(second.src_info, (std::vector<std::int32_t>{1, 1, -1, -1, 0, 0, -1, -1}));
  EXPECT_EQ(value_at(second, 0), 2.0f);
  EXPECT_EQ(value_at(second, 1), 2.0f) << "an expert named twice gets the token twice";
  EXPECT_EQ(value_at(second, 4), 1.0f);
  EXPECT_EQ(value_at(second, 5), 3.0f);
  EXPECT_EQ(result.selection_row[0], (std::vector<std::int64_t>{0, 4, 0, 1}));
  EXPECT_EQ(result.selection_row[1], (std::vector<std::int64_t>{-1, 5}));
}

TEST(OracleLowLatencyDispatch, RankMajorHasARowForEachToken) {
  const auto result = low_latency_dispatch(kShape, inputs_of_two_ranks(), RowFormat::bf16, true);
  const LowLatencyReceived& second = result.received[1];
  EXPECT_EQ(second.count, (std::vector<std::int32_t>{2, 1}));
  EXPECT_EQ(second.layout_range, (std::vector<std::int64_t>{range(0, 2), range(0, 1)}));
  EXPECT_EQ(second.src_info, (std::vector<std::int32_t>{0, 1, 0, -1}));
  EXPECT_EQ(second.topk_idx, (std::vector<std::int32_t>{-1, 1, 0, 0, -1, 1, -1, -1}));
  EXPECT_EQ(second.topk_weights, (std::vector<float>{0, 0.25f, 1, 2, 0, 8, 0, 0}));
  EXPECT_EQ(value_at(second, 2), 3.0f);
  EXPECT_EQ(result.selection_row[0], (std::vector<std::int64_t>{0, 0, 1, 1}));
}

TEST(OracleLowLatencyDispatch, AHiddenSizeOfZeroGivesTheSameRoutes) {
  LowLatencyShape shape = kShape;
  shape.hidden = 0;
  const auto whole = low_latency_dispatch(kShape, inputs_of_two_ranks(), RowFormat::bf16);
  const auto routes = low_latency_dispatch(shape, inputs_of_two_ranks(), RowFormat::bf16);
  EXPECT_EQ(routes.selection_row, whole.selection_row);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(routes.received[rank].count, whole.received[rank].count);
    EXPECT_EQ(routes.received[rank].layout_range, whole.received[rank].layout_range);
    EXPECT_EQ(routes.received[rank].src_info, whole.received[rank].src_info);
    EXPECT_TRUE(routes.received[rank].x.empty());
  }
}

TEST(OracleLowLatencyDispatch, MaskedSourcesLeaveEmptyBlocks) {
  const Masks masks = {0, 0, 1, 0};  // rank 1 has masked rank 0
  const auto result = low_latency_dispatch(kShape, inputs_of_two_ranks(), RowFormat::bf16, false, masks);
  EXPECT_EQ(result.received[1].count, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(result.received[1].layout_range, (std::vector<std::int64_t>{0, 0, 0, range(0, 1)}));
  EXPECT_EQ(result.received[0].count, (std::vector<std::int32_t>{1, 0})) << "rank 0 still has its own";
  EXPECT_EQ(result.selection_row[0], (std::vector<std::int64_t>{0, -1, -1, -1}));
}

TEST(OracleLowLatencyDispatch, FormatsAgreeOnTheValue) {
  for (const RowFormat format : kRowFormats) {
    const LowLatencyShape shape{.ranks = 1, .experts = 1, .hidden = 512, .max_tokens = 1};
    LowLatencyInput input{{1, 1, {0}, {1.0f}}, {}};
    for (int i = 0; i < 512; ++i) input.x.push_back(bf16_bits(static_cast<float>(i / 128 + 1) * (i % 2 != 0 ? -1 : 1)));
    const auto result = low_latency_dispatch(shape, std::vector{input}, format);
    FormattedRow row{result.received[0].x, result.received[0].scales, result.received[0].packed_scales};
    if (float_scales(format, 512) != 1 && format != RowFormat::nvfp4) {
      EXPECT_EQ(unformat_row(row, format), input.x) << name_of(format);
    } else {
      const std::vector<std::uint16_t> back = unformat_row(row, format);
      ASSERT_EQ(back.size(), input.x.size());
      for (std::size_t i = 0; i < back.size(); ++i) {
        EXPECT_NEAR(bf16_value(back[i]), bf16_value(input.x[i]), std::fabs(bf16_value(input.x[i])) / 15)
            << name_of(format) << " " << i;
      }
    }
    EXPECT_EQ(static_cast<std::int64_t>(row.scales.size()), float_scales(format, 512));
    EXPECT_EQ(static_cast<std::int64_t>(row.packed_scales.size()), packed_scales(format, 512));
  }
}

/// Rows of rank r's experts: rank 0's row 0 is 10; rank 1's rows 0, 1 (expert 2) are 20, 30 and 4, 5 (expert 3) 40, 50.
std::vector<LowLatencyCombineInput> expert_rows(const std::vector<LowLatencyInput>& inputs) {
  std::vector<LowLatencyCombineInput> result(2);
  for (std::size_t r = 0; r < 2; ++r) {
    result[r].selection = inputs[r].selection;
    result[r].x.assign(2 * 4 * 128, bf16_bits(std::numeric_limits<float>::quiet_NaN()));  // what nobody may read
  }
  const auto set = [&](std::size_t rank, std::size_t row, float value) {
    std::fill_n(result[rank].x.begin() + static_cast<std::ptrdiff_t>(row * 128), 128, bf16_bits(value));
  };
  set(0, 0, 10);
  set(1, 0, 20);
  set(1, 1, 30);
  set(1, 4, 40);
  set(1, 5, 50);
  return result;
}

TEST(OracleLowLatencyCombine, WeighsAndAdds) {
  const auto inputs = inputs_of_two_ranks();
  const auto plan = low_latency_dispatch(kShape, inputs, RowFormat::bf16);
  const auto result = low_latency_combine(plan, expert_rows(inputs));
  EXPECT_EQ(bf16_value(result[0].x[0]), 0.5f * 10 + 0.25f * 40);
  EXPECT_EQ(bf16_value(result[0].x[128]), 20.0f + 2 * 30);
  EXPECT_EQ(bf16_value(result[1].x[0]), 8.0f * 50);
  EXPECT_DOUBLE_EQ(result[0].sum[0], 15.0);
  EXPECT_GT(result[0].tolerance[0], 0.0);
  EXPECT_LT(result[0].tolerance[0], 0.2);
}

TEST(OracleLowLatencyCombine, LeavesOutWhatWasRemovedOrMasked) {
  const auto inputs = inputs_of_two_ranks();
  const auto plan = low_latency_dispatch(kShape, inputs, RowFormat::bf16);
  auto rows = expert_rows(inputs);
  rows[0].selection.idx = {0, -1, 2, -5};
  auto result = low_latency_combine(plan, rows);
  EXPECT_EQ(bf16_value(result[0].x[0]), 5.0f);
  EXPECT_EQ(bf16_value(result[0].x[128]), 20.0f);
  rows[0].selection.idx = {0, 3, 2, 2};
  result = low_latency_combine(plan, rows, {.masks = {0, 1, 0, 0}});
  EXPECT_EQ(bf16_value(result[0].x[0]), 5.0f);
  EXPECT_EQ(result[0].x[128], 0) << "nothing left";
  EXPECT_EQ(bf16_value(result[1].x[0]), 400.0f);
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

TEST(OracleLowLatencyCombine, ByRailsAnotherNodesPartIsAddedOnItsOwn) {
  const float big = 0x1p24f;  // where fp32 has no odd numbers
  const std::vector<float> parts = {big, 1.0f, -big, 1.0f};
  EXPECT_EQ(combine_parts(parts, 0, 0), 1.0f) << "the first 1 is lost";
  EXPECT_EQ(combine_parts(parts, 0, 2), 0.0f) << "the second rounds off, too";
  EXPECT_EQ(combine_parts({0.0f, 1.0f, big, -big}, 0, 0), 0.0f) << "lost beside the big one";
  EXPECT_EQ(combine_parts({0.0f, 1.0f, big, -big}, 0, 2), 1.0f) << "the big ones go first";
  // Three nodes, the owner in the second: its node's parts come one by one, between the other nodes'.
  EXPECT_EQ(combine_parts({1.0f, 0.0f, big, -big, 0.0f, 0.0f}, 2, 2), 0.0f);
  EXPECT_EQ(combine_parts({1.0f, 0.0f, big, -big, 0.0f, 3.0f}, 2, 2), 3.0f);
}

TEST(OracleLowLatencyCombine, RankMajorRowsAreParts) {
  const auto inputs = inputs_of_two_ranks();
  const auto plan = low_latency_dispatch(kShape, inputs, RowFormat::bf16, true);
  std::vector<LowLatencyCombineInput> rows(2);
  for (std::size_t r = 0; r < 2; ++r) {
    rows[r].selection = inputs[r].selection;
    for (int row = 0; row < 4; ++row) rows[r].x.insert(rows[r].x.end(), 128, bf16_bits(static_cast<float>(row + 1)));
  }
  const auto result = low_latency_combine(plan, rows);
  EXPECT_EQ(bf16_value(result[0].x[0]), 1.0f + 1.0f);
  EXPECT_EQ(bf16_value(result[0].x[128]), 2.0f) << "both selections share the row";
  EXPECT_EQ(bf16_value(result[1].x[0]), 3.0f);
}

}  // namespace
}  // namespace deep_ep::oracle
