// Calls of both modes whose ranks reach each other through RoCE devices.
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>

#include "tests/cluster/processes.hpp"
#include "tests/rxe/low_latency_ranks.hpp"
#include "tests/rxe/normal_mode_ranks.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep::test {
namespace {

/// The variables of a group of ranks on soft-RoCE devices, until the end of the test. See rxe_settings.hpp.
class RxeCalls : public testing::Test {
 protected:
  void nodes_of(int ranks) { nodes_.emplace("DEEP_EP_RANKS_PER_NODE", std::to_string(ranks)); }

  /// Packets that both devices have sent.
  static std::int64_t packets() {
    std::int64_t sum = 0;
    for (const std::string device : {"rxe0", "rxe1"}) {
      std::ifstream file("/sys/class/infiniband/" + device + "/ports/1/hw_counters/sent_pkts");
      std::int64_t sent = 0;
      if (!(file >> sent)) throw std::runtime_error("no counter of " + device);
      sum += sent;
    }
    return sum;
  }

 private:
  Setting wire_{"DEEP_EP_RDMA_WIRE", "verbs"};
  Setting ack_timeout_{"DEEP_EP_RDMA_ACK_TIMEOUT", "16"};
  Setting retry_count_{"DEEP_EP_RDMA_RETRY_COUNT", "7"};
  std::optional<Setting> nodes_;
};

TEST_F(RxeCalls, LowLatencyOfTwoNodesOfOneRank) {
  nodes_of(1);
  const std::int64_t before = packets();
  expect_ranks_succeed(2, [](const auto& bootstrap) { run_low_latency_calls(bootstrap); });
  EXPECT_GT(packets(), before + 100);
}

TEST_F(RxeCalls, LowLatencyOfTwoNodesOfTwoRanks) {
  nodes_of(2);
  const std::int64_t before = packets();
  expect_ranks_succeed(4, [](const auto& bootstrap) { run_low_latency_calls(bootstrap); });
  EXPECT_GT(packets(), before + 100);
}

/// Of a rank of another rail the device beside it in its node receives.
TEST_F(RxeCalls, LowLatencyOfTwoNodesOfTwoRanksThatKeepToRails) {
  nodes_of(2);
  const Setting rail_only("DEEP_EP_RAIL_ONLY", "1");
  const std::int64_t before = packets();
  expect_ranks_succeed(4, [](const auto& bootstrap) { run_low_latency_calls(bootstrap); });
  EXPECT_GT(packets(), before + 100);
}

TEST_F(RxeCalls, LowLatencyOfTwoNodesOfTwoRanksByRails) {
  nodes_of(2);
  const Setting rails("DEEP_EP_LOW_LATENCY_RAILS", "always");
  const std::int64_t before = packets();
  expect_ranks_succeed(4, [](const auto& bootstrap) { run_low_latency_calls(bootstrap, 2); });
  EXPECT_GT(packets(), before + 100);
}

TEST_F(RxeCalls, NormalModeOfTwoNodesOfTwoRanks) {
  nodes_of(2);
  const std::int64_t before = packets();
  expect_ranks_succeed(4, [](const auto& bootstrap) { run_normal_mode(bootstrap, 2); });
  EXPECT_GT(packets(), before + 100);
}

}  // namespace
}  // namespace deep_ep::test
