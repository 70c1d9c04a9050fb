// The demo's check: it accepts what is right, and notices mistakes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "oracle/bf16.hpp"
#include "oracle/low_latency.hpp"
#include "tests/rdma/messages.hpp"
#include "tools/common/check_rows.hpp"
#include "tools/demo/layer.hpp"
#include "tools/demo/model.hpp"

namespace deep_ep::tools {
namespace {

TEST(DemoCheck, AcceptsTheRightSumAndNoticesALostExpert) {
  ModelShape shape;
  shape.hidden = 64;
  const auto words = split_words("Tokens go where their experts are; results come back, and are added up.");
  const Batch batch = make_batch(shape, words, 4, 8);
  for (int lost = -1; lost < shape.topk; ++lost) {  // of token 0; at first none
    std::vector<std::uint16_t> output;
    for (std::size_t i = 0; i < batch.x.size(); ++i) {
      const auto token = i / static_cast<std::size_t>(shape.hidden);
      float sum = 0;
      for (int k = 0; k < shape.topk; ++k) {
        if (token == 0 && k == lost) continue;
        const std::size_t at = token * static_cast<std::size_t>(shape.topk) + static_cast<std::size_t>(k);
        sum += batch.weights[at] * expert_scale(static_cast<int>(batch.experts[at])) * oracle::bf16_value(batch.x[i]);
      }
      output.push_back(oracle::bf16_bits(sum));
    }
    const auto check = [&] { EXPECT_GT(check_output(shape, batch, 1, 4, output), 0) << "BF16 cannot be exact"; };
    if (lost < 0) {
      check();
    } else {
      EXPECT_TRUE(test::contains(test::message_of<Error>(check), "rank 1, token 0")) << "selection " << lost;
    }
  }
}

TEST(DemoCheck, NoticesSwappedRowsAndShortResults) {
  oracle::Received expected;
  expected.rows = 2;
  expected.src_rank = {1, 0};
  expected.src_idx = {0, 3};
  const auto fill = [](int source, std::int64_t token, std::span<int> row) {
    row[0] = 10 * source + static_cast<int>(token);
  };
  const auto check = [&](const std::vector<int>& rows) { check_rows(expected, 2, "rows", rows, 1, fill); };
  check({10, 3});
  EXPECT_EQ(test::message_of<Error>([&] {
              check({3, 10});
            }),
            "check: row 0 of the rows of rank 2 is not token 0 of rank 1");
  EXPECT_EQ(test::message_of<Error>([&] { check({10}); }), "check: rank 2 received 1 rows, expected 2");
}

TEST(DemoCheck, NoticesAWrongWeight) {
  oracle::Received expected;
  expected.topk_weights = {1, 2};
  check_selection(expected, 2, {}, std::vector<float>{1, 2});
  EXPECT_THROW(check_selection(expected, 2, {}, std::vector<float>{1, 2.001f}), Error);
}

/// A token for each of two ranks, both for the one expert of rank 1.
TEST(LowLatencyDifference, IsFoundInEveryPart) {
  const std::vector<oracle::Selection> selections(2, {.tokens = 1, .topk = 1, .idx = {1}, .weights = {}});
  const oracle::LowLatencyDispatched right = oracle::low_latency_dispatch({2, 2, 1}, selections);
  std::vector<std::uint16_t> rows(2 * 128, oracle::bf16_bits(1));
  rows[128] = oracle::bf16_bits(2);
  const auto sent = [&](int source, std::int64_t) { return oracle::Row(rows).subspan(source == 0 ? 0 : 128, 128); };
  oracle::LowLatencyOutput good{.routes = right.received[1], .x = {}, .scales = {}};
  for (const int source : {0, 1}) {
    const oracle::FormattedRow row = oracle::format_row(sent(source, 0), oracle::RowFormat::fp8);
    good.x.insert(good.x.end(), row.x.begin(), row.x.end());
    good.scales.push_back(row.scales[0]);
  }
  const auto text = [&](const auto& change) {
    oracle::LowLatencyOutput seen = good;
    change(seen);
    return oracle::difference(right.shape, oracle::RowFormat::fp8, right.received[1], seen, sent);
  };
  EXPECT_EQ(text([](auto&) {}), "");
  EXPECT_EQ(text([](auto& seen) { seen.routes.count[0] = 1; }), "1 rows of local expert 0, expected 2");
  EXPECT_EQ(text([](auto& seen) { seen.routes.layout_range[1] = 2; }),
            "rows 0 + 2 of local expert 0 are of rank 1, expected 1 + 1");
  const std::string second = "row 1 of local expert 0 is not token 0 of rank 1";
  EXPECT_EQ(text([](auto& seen) { seen.routes.src_info[1] = 1; }), second);
  EXPECT_EQ(text([](auto& seen) { seen.x[128] ^= std::byte{1}; }), second);
  EXPECT_EQ(text([](auto& seen) { ++seen.scales[1]; }), second);
  EXPECT_EQ(text([](auto& seen) { seen.x.pop_back(); }), "row 0 of local expert 0 is not token 0 of rank 0");
}

}  // namespace
}  // namespace deep_ep::tools
