// The model of when low-latency calls go by rails.
#include "csrc/buffer/low_latency/rails.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "csrc/buffer/options.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep {
namespace {

constexpr std::size_t kFp8Row = 7936;
constexpr std::size_t kBf16Row = 15360;

RailTraffic traffic(int nodes, int tokens, std::size_t row_bytes = kFp8Row) {
  return {.ranks = 8 * nodes,
          .ranks_per_node = 8,
          .topk = 8,
          .max_tokens = tokens,
          .row_bytes = row_bytes,
          .rail_row_bytes = row_bytes};
}

/// That none of `topk` different ones of `experts` is among `of_them` of these.
double none_of(int experts, int of_them, int topk) {
  double probability = 1;
  for (int k = 0; k < topk; ++k) probability *= static_cast<double>(experts - of_them - k) / (experts - k);
  return probability;
}

/// docs/low-latency.md, "What crosses the NIC", counts top-8 of 256 different experts; the model draws experts
/// independently of each other, so it comes a little lower.
TEST(LowLatencyRailModel, GivesTheTableOfTheDocument) {
  struct Line {
    int nodes;
    double direct, by_rails;  // rows of a token
  };
  for (const Line& line : {Line{2, 3.26, 1.00}, Line{4, 5.45, 2.71}, Line{8, 6.72, 4.63}}) {
    SCOPED_TRACE(line.nodes);
    const int ranks = 8 * line.nodes;
    EXPECT_NEAR((ranks - 8) * (1 - none_of(256, 256 / ranks, 8)), line.direct, 0.006);
    EXPECT_NEAR((line.nodes - 1) * (1 - none_of(256, 256 / line.nodes, 8)), line.by_rails, 0.006);
    const RailBytes bytes = bytes_between_nodes(traffic(line.nodes, 128));
    EXPECT_NEAR(bytes.direct / (128.0 * kFp8Row), line.direct, 0.02 * line.direct);
    EXPECT_NEAR(bytes.by_rails / (128.0 * kFp8Row), line.by_rails, 0.02 * line.by_rails);
  }
}

TEST(LowLatencyRailModel, BytesAreThoseOfTheRows) {
  for (const int nodes : {2, 4, 8}) {
    const RailBytes one = bytes_between_nodes(traffic(nodes, 1));
    const RailBytes many = bytes_between_nodes(traffic(nodes, 96, 2 * kFp8Row));
    EXPECT_DOUBLE_EQ(many.direct, 2 * 96 * one.direct);
    EXPECT_DOUBLE_EQ(many.by_rails, 2 * 96 * one.by_rails);
    EXPECT_LT(one.by_rails, one.direct);
  }
  // One selection goes to one rank of one node: nothing is saved.
  RailTraffic single = traffic(4, 128);
  single.topk = 1;
  const RailBytes bytes = bytes_between_nodes(single);
  EXPECT_NEAR(bytes.by_rails, bytes.direct, 1e-6 * bytes.direct);
  EXPECT_FALSE(rails_pay(single));
}

TEST(LowLatencyRailModel, PaysFromSomeTokensOn) {
  for (const int nodes : {2, 4, 8}) {
    for (const std::size_t row_bytes : {kFp8Row, kBf16Row}) {
      EXPECT_FALSE(rails_pay(traffic(nodes, 1, row_bytes)));
      EXPECT_TRUE(rails_pay(traffic(nodes, 128, row_bytes)));
      bool pays = false;
      for (int tokens = 1; tokens <= 256; ++tokens) {
        const bool now = rails_pay(traffic(nodes, tokens, row_bytes));
        EXPECT_TRUE(now || !pays) << nodes << " nodes, " << tokens << " tokens";
        pays = now;
      }
    }
  }
  // By the table: 7.9 of 25.9 kB per token are left between two nodes, and 5 us are 250 kB at 50 GB/s: 14 tokens.
  EXPECT_FALSE(rails_pay(traffic(2, 13)));
  EXPECT_TRUE(rails_pay(traffic(2, 16)));
}

TEST(LowLatencyRailChoice, TheProgramThenTheVariable) {
  const auto with = [](const std::optional<std::string>& value, LowLatencyRails asked) {
    const Setting setting("DEEP_EP_LOW_LATENCY_RAILS", value);
    return asked_for_rails(asked);
  };
  using enum LowLatencyRails;
  EXPECT_EQ(with(std::nullopt, automatic), automatic);
  EXPECT_EQ(with("auto", automatic), automatic);
  EXPECT_EQ(with("always", automatic), always);
  EXPECT_EQ(with("never", automatic), never);
  EXPECT_EQ(with("never", always), always);
  EXPECT_EQ(with("always", never), never);
  EXPECT_EQ(with("neither", never), never) << "not looked at";
}

TEST(LowLatencyNvLink, AVariableSwitchesItOff) {
  const auto with = [](const char* name, const char* value, bool asked = true) {
    const Setting setting(name, value);
    BufferOptions options;
    options.low_latency.bytes = 1024;
    options.low_latency.allow_nvlink = asked;
    return agree_on_options(*make_thread_bootstraps(1).front(), options).options.low_latency.allow_nvlink;
  };
  EXPECT_TRUE(with("DEEP_EP_NVLINK", "on"));
  EXPECT_FALSE(with("DEEP_EP_NVLINK", "on", false)) << "the program has said so";
  EXPECT_FALSE(with("DEEP_EP_NVLINK", "off"));
  EXPECT_FALSE(with("NVSHMEM_DISABLE_P2P", "true"));
  EXPECT_TRUE(with("NVSHMEM_DISABLE_P2P", "0"));
  EXPECT_FALSE(with("NCCL_P2P_DISABLE", "1"));
  const Setting own("DEEP_EP_NVLINK", "on");
  EXPECT_TRUE(with("NCCL_P2P_DISABLE", "1"));
}

TEST(LowLatencyRailChoice, AnUnknownValueIsRefused) {
  const Setting setting("DEEP_EP_LOW_LATENCY_RAILS", "sometimes");
  try {
    asked_for_rails(LowLatencyRails::automatic);
    FAIL() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    for (const char* const word : {"DEEP_EP_LOW_LATENCY_RAILS", "sometimes", "always", "never"}) {
      EXPECT_NE(text.find(word), std::string::npos) << text;
    }
  }
}

}  // namespace
}  // namespace deep_ep
