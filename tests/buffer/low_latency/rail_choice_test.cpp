// The model of when low-latency calls go by rails.
#include "csrc/buffer/low_latency/rails.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "csrc/buffer/options.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep {
namespace {

RailTraffic traffic(int nodes, int tokens, int topk = 8) {
  constexpr std::size_t kFp8Row = 7936;
  return {.ranks = 8 * nodes,
          .ranks_per_node = 8,
          .topk = topk,
          .max_tokens = tokens,
          .row_bytes = kFp8Row,
          .rail_row_bytes = kFp8Row};
}

/// docs/low-latency.md, "What crosses the NIC": rows of a token directly and by rails. The model draws experts
/// independently of each other, so it comes a little lower than the table.
TEST(LowLatencyRailModel, GivesTheTableOfTheDocument) {
  struct Line {
    int nodes;
    double direct, by_rails;
  };
  for (const Line& line : {Line{2, 3.26, 1.00}, Line{4, 5.45, 2.71}, Line{8, 6.72, 4.63}}) {
    SCOPED_TRACE(line.nodes);
    const RailTraffic of_calls = traffic(line.nodes, 128);
    const RailBytes bytes = bytes_between_nodes(of_calls);
    const double of_a_row = 128.0 * static_cast<double>(of_calls.row_bytes);
    EXPECT_NEAR(bytes.direct / of_a_row, line.direct, 0.02 * line.direct);
    EXPECT_NEAR(bytes.by_rails / of_a_row, line.by_rails, 0.02 * line.by_rails);
    EXPECT_TRUE(rails_pay(of_calls));
    EXPECT_FALSE(rails_pay(traffic(line.nodes, 1)));
  }
  EXPECT_FALSE(rails_pay(traffic(4, 128, 1))) << "one selection goes to one rank of one node: nothing is saved";
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
  EXPECT_TRUE(test::says(test::message_of<InvalidArgument>([&] { with("sometimes", automatic); }),
                         {"DEEP_EP_LOW_LATENCY_RAILS", "sometimes", "always", "never"}));
}

}  // namespace
}  // namespace deep_ep
