// The demo's own model and reference: routing as the model says, and a check that notices what it should.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "tools/common/number_formats.hpp"
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
        sum += batch.weights[at] * expert_scale(static_cast<int>(batch.experts[at])) * bf16_to_float(batch.x[i]);
      }
      result[i] = float_to_bf16(sum);
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
  for (const ExpectedRow& row : reference.rows(0)) {
    const auto from = sources[static_cast<std::size_t>(row.source)].subspan(
        static_cast<std::size_t>(row.token) * row_bytes, row_bytes);
    received.insert(received.end(), from.begin(), from.end());
  }
  ASSERT_GE(reference.rows(0).size(), 2u);
  EXPECT_EQ(reference.check_rows(0, "rows", received, sources, row_bytes).differing, 0);
  EXPECT_GT(reference.check_rows(0, "rows", std::span(received).first(row_bytes), sources, row_bytes).differing, 0);
  std::swap_ranges(received.begin(), received.begin() + static_cast<std::ptrdiff_t>(row_bytes),
                   received.begin() + static_cast<std::ptrdiff_t>(row_bytes));
  EXPECT_EQ(reference.check_rows(0, "rows", received, sources, row_bytes).differing, 2);
}

TEST_F(DemoReference, NoticesAWrongWeight) {
  const Reference reference(shape_, batches_);
  const auto topk = static_cast<std::size_t>(shape_.topk);
  std::vector<std::int64_t> experts;
  std::vector<float> weights;
  for (const ExpectedRow& row : reference.rows(2)) {
    const Batch& batch = batches_[static_cast<std::size_t>(row.source)];
    for (std::size_t at = static_cast<std::size_t>(row.token) * topk;
         at < (static_cast<std::size_t>(row.token) + 1) * topk; ++at) {
      const bool here = reference.owner(batch.experts[at]) == 2;
      experts.push_back(here ? batch.experts[at] - 2 * reference.local_experts() : -1);
      weights.push_back(here ? batch.weights[at] : 0.0f);
    }
  }
  EXPECT_EQ(reference.check_selection(2, experts, weights).differing, 0);
  weights.front() += 1e-3f;
  EXPECT_EQ(reference.check_selection(2, experts, weights).differing, 1);
}

TEST(DemoNumberFormats, E4m3) {
  EXPECT_EQ(float_to_e4m3(0.0f), 0x00);
  EXPECT_EQ(float_to_e4m3(1.0f), 0x38);
  EXPECT_EQ(float_to_e4m3(-1.5f), 0xbc);
  EXPECT_EQ(float_to_e4m3(448.0f), 0x7e);
  EXPECT_EQ(float_to_e4m3(1e9f), 0x7e) << "saturates";
  EXPECT_EQ(float_to_e4m3(17.0f), 0x58) << "tie to even, down";
  EXPECT_EQ(float_to_e4m3(19.0f), 0x5a) << "tie to even, up";
  EXPECT_EQ(float_to_e4m3(0x1p-9f), 0x01) << "smallest subnormal";
  EXPECT_EQ(float_to_e4m3(0x1.fp-7f), 0x08) << "rounds up to the smallest normal";
}

}  // namespace
}  // namespace deep_ep::tools
