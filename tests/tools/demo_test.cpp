// The demo's own model and reference: routing as the model says, and a check that notices mistakes.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "oracle/bf16.hpp"
#include "tools/demo/model.hpp"
#include "tools/demo/reference.hpp"

namespace deep_ep::tools {
namespace {

constexpr int kRanks = 4;

class DemoReference : public testing::Test {
 protected:
  DemoReference() {
    shape_.hidden = 64;
    const auto words = split_words("Tokens go where their experts are; results come back, and are added up.");
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      batches_.push_back(make_batch(shape_, std::span(words).subspan(rank * 4, 4), ""));
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

  ModelShape shape_;
  std::vector<Batch> batches_;
};

TEST(DemoModel, SplitsWordsAndPunctuation) {
  const std::vector<std::string> expected = {"a_1", ",", "b", "-", "c", "(", "d", ")", "\xc3\xa9t\xc3\xa9"};
  EXPECT_EQ(split_words("a_1, b-c\n(d) \xc3\xa9t\xc3\xa9"), expected);
  EXPECT_TRUE(split_words(" \n\t").empty());
}

TEST_F(DemoReference, RoutingKeepsToTheBestGroups) {
  const auto topk = static_cast<std::size_t>(shape_.topk);
  for (const Batch& batch : batches_) {
    for (std::size_t begin = 0; begin < batch.experts.size(); begin += topk) {
      const std::set<std::int64_t> experts(&batch.experts[begin], &batch.experts[begin] + topk);
      EXPECT_EQ(experts.size(), topk) << "an expert twice";
      std::set<std::int64_t> groups;
      for (const std::int64_t expert : experts) groups.insert(expert / (shape_.experts / shape_.groups));
      EXPECT_LE(groups.size(), static_cast<std::size_t>(shape_.used_groups));
      const float sum = std::accumulate(&batch.weights[begin], &batch.weights[begin] + topk, 0.0f);
      EXPECT_NEAR(sum, shape_.scaling, 1e-5);
    }
  }
}

TEST_F(DemoReference, AcceptsTheRightSum) {
  const Reference reference(shape_, batches_);
  for (int rank = 0; rank < kRanks; ++rank) {
    const Difference difference = reference.check_output(rank, output(batches_[static_cast<std::size_t>(rank)]));
    EXPECT_EQ(difference.differing, 0) << difference.first;
    EXPECT_GT(difference.largest, 0) << "BF16 cannot be exact";
  }
}

TEST_F(DemoReference, NoticesALostExpert) {
  const Reference reference(shape_, batches_);
  for (std::size_t k = 0; k < static_cast<std::size_t>(shape_.topk); ++k) {
    const Difference difference = reference.check_output(1, output(batches_[1], k));
    EXPECT_GT(difference.differing, shape_.hidden / 2) << "selection " << k;
    EXPECT_NE(difference.first.find("rank 1, token 0"), std::string::npos) << difference.first;
  }
}

TEST_F(DemoReference, NoticesSwappedRowsAndShortResults) {
  const Reference reference(shape_, batches_);
  const std::size_t row_bytes = static_cast<std::size_t>(shape_.hidden) * 2;
  std::vector<std::span<const std::byte>> sources;
  for (const Batch& batch : batches_) sources.push_back(std::as_bytes(std::span(batch.x)));
  std::vector<std::byte> received;
  const oracle::Received& expected = reference.received(0);
  for (std::size_t i = 0; i < expected.src_idx.size(); ++i) {
    const auto from = sources[static_cast<std::size_t>(expected.src_rank[i])].subspan(
        static_cast<std::size_t>(expected.src_idx[i]) * row_bytes, row_bytes);
    received.insert(received.end(), from.begin(), from.end());
  }
  ASSERT_GE(expected.rows, 2);
  EXPECT_EQ(reference.check_rows(0, "rows", received, sources, row_bytes).differing, 0);
  EXPECT_GT(reference.check_rows(0, "rows", std::span(received).first(row_bytes), sources, row_bytes).differing, 0);
  std::swap_ranges(received.begin(), received.begin() + static_cast<std::ptrdiff_t>(row_bytes),
                   received.begin() + static_cast<std::ptrdiff_t>(row_bytes));
  EXPECT_EQ(reference.check_rows(0, "rows", received, sources, row_bytes).differing, 2);
}

TEST_F(DemoReference, NoticesAWrongWeight) {
  const Reference reference(shape_, batches_);
  const std::vector<std::int64_t> experts = reference.received(2).topk_idx;
  std::vector<float> weights = reference.received(2).topk_weights;
  EXPECT_EQ(reference.check_selection(2, experts, weights).differing, 0);
  weights.front() += 1e-3f;
  EXPECT_EQ(reference.check_selection(2, experts, weights).differing, 1);
}

}  // namespace
}  // namespace deep_ep::tools
