// The demo's check: it accepts what is right, and notices mistakes.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>

#include "deep_ep/error.hpp"
#include "oracle/bf16.hpp"
#include "tools/common/check_rows.hpp"
#include "tools/demo/layer.hpp"
#include "tools/demo/model.hpp"

namespace deep_ep::tools {
namespace {

constexpr int kRanks = 4;

class DemoCheck : public testing::Test {
 protected:
  DemoCheck() {
    shape_.hidden = 64;
    const auto words = split_words("Tokens go where their experts are; results come back, and are added up.");
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      batches_.push_back(make_batch(shape_, words, rank * 4, rank * 4 + 4));
    }
  }

  /// The sum of the experts' outputs, without any communication; `without` leaves one selection of token 0 out.
  std::vector<std::uint16_t> output(const Batch& batch, std::optional<std::size_t> without = {}) const {
    const auto hidden = static_cast<std::size_t>(shape_.hidden);
    const auto topk = static_cast<std::size_t>(shape_.topk);
    std::vector<std::uint16_t> result(batch.x.size());
    for (std::size_t i = 0; i < result.size(); ++i) {
      float sum = 0;
      for (std::size_t k = 0; k < topk; ++k) {
        const std::size_t at = i / hidden * topk + k;
        if (at == without) continue;
        sum += batch.weights[at] * expert_scale(static_cast<int>(batch.experts[at])) * oracle::bf16_value(batch.x[i]);
      }
      result[i] = oracle::bf16_bits(sum);
    }
    return result;
  }

  template <class Call>
  static std::string error_in(Call&& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  ModelShape shape_;
  std::vector<Batch> batches_;
};

TEST_F(DemoCheck, AcceptsTheRightSum) {
  for (int rank = 0; rank < kRanks; ++rank) {
    const Batch& batch = batches_[static_cast<std::size_t>(rank)];
    EXPECT_GT(check_output(shape_, batch, rank, kRanks, output(batch)), 0) << "BF16 cannot be exact";
  }
}

TEST_F(DemoCheck, NoticesALostExpert) {
  for (std::size_t k = 0; k < static_cast<std::size_t>(shape_.topk); ++k) {
    const auto error = error_in([&] { check_output(shape_, batches_[1], 1, kRanks, output(batches_[1], k)); });
    EXPECT_NE(error.find("rank 1, token 0"), std::string::npos) << "selection " << k << ": " << error;
  }
}

TEST_F(DemoCheck, NoticesSwappedRowsAndShortResults) {
  const oracle::Dispatched routes = routes_of(shape_, batches_);
  const oracle::Received& expected = routes.received[0];
  const auto hidden = static_cast<std::size_t>(shape_.hidden);
  const auto fill = [&](int source, std::int64_t token, std::span<std::uint16_t> row) {
    std::copy_n(batches_[static_cast<std::size_t>(source)].x.begin() + token * shape_.hidden, hidden, row.begin());
  };
  std::vector<std::uint16_t> received(static_cast<std::size_t>(expected.rows) * hidden);
  for (std::size_t i = 0; i < expected.src_idx.size(); ++i) {
    fill(expected.src_rank[i], expected.src_idx[i], std::span(received).subspan(i * hidden, hidden));
  }
  ASSERT_GE(expected.rows, 2);
  const auto error = [&] { return error_in([&] { check_rows(expected, 0, "rows", received, hidden, fill); }); };
  EXPECT_EQ(error(), "");
  const auto second = received.begin() + static_cast<std::ptrdiff_t>(hidden);
  std::swap_ranges(received.begin(), second, second);
  EXPECT_EQ(error().find("check: row 0 of the rows of rank 0 is not token "), 0u) << error();
  received.resize(hidden);
  EXPECT_EQ(error().find("check: rank 0 received 1 rows, expected "), 0u) << error();
}

TEST_F(DemoCheck, NoticesAWrongWeight) {
  const oracle::Dispatched routes = routes_of(shape_, batches_);
  const oracle::Received& expected = routes.received[2];
  std::vector<float> weights = expected.topk_weights;
  EXPECT_NO_THROW(check_selection(expected, 2, expected.topk_idx, weights));
  weights.front() += 1e-3f;
  EXPECT_THROW(check_selection(expected, 2, expected.topk_idx, weights), Error);
}

}  // namespace
}  // namespace deep_ep::tools
