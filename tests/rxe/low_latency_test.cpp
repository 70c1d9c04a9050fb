// Low-latency calls whose ranks reach each other through RoCE devices.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>

#include "tests/rdma/rank_threads.hpp"
#include "tests/rxe/low_latency_ranks.hpp"

namespace deep_ep::test {
namespace {

/// The variables of a group of ranks on soft-RoCE devices, until the end of the test. See rxe_settings.hpp.
class RxeLowLatency : public testing::Test {
 protected:
  RxeLowLatency() {
    ::setenv("DEEP_EP_RDMA_WIRE", "verbs", 1);
    ::setenv("DEEP_EP_RDMA_ACK_TIMEOUT", "16", 1);
    ::setenv("DEEP_EP_RDMA_RETRY_COUNT", "7", 1);
  }
  ~RxeLowLatency() override {
    for (const char* name : {"DEEP_EP_RDMA_WIRE", "DEEP_EP_RDMA_ACK_TIMEOUT", "DEEP_EP_RDMA_RETRY_COUNT",
                             "DEEP_EP_RANKS_PER_NODE", "DEEP_EP_LOW_LATENCY_RAILS"}) {
      ::unsetenv(name);
    }
  }
  static void nodes_of(int ranks) { ::setenv("DEEP_EP_RANKS_PER_NODE", std::to_string(ranks).c_str(), 1); }

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
};

TEST_F(RxeLowLatency, TwoNodesOfOneRank) {
  nodes_of(1);
  const std::int64_t before = packets();
  expect_ranks_succeed(2, [](const auto& bootstrap) { run_low_latency_calls(bootstrap); });
  EXPECT_GT(packets(), before + 100);
}

TEST_F(RxeLowLatency, TwoNodesOfTwoRanks) {
  nodes_of(2);
  const std::int64_t before = packets();
  expect_ranks_succeed(4, [](const auto& bootstrap) { run_low_latency_calls(bootstrap); });
  EXPECT_GT(packets(), before + 100);
}

TEST_F(RxeLowLatency, TwoNodesOfTwoRanksByRails) {
  nodes_of(2);
  ::setenv("DEEP_EP_LOW_LATENCY_RAILS", "always", 1);
  const std::int64_t before = packets();
  expect_ranks_succeed(4, [](const auto& bootstrap) { run_low_latency_calls(bootstrap, 2); });
  EXPECT_GT(packets(), before + 100);
}

}  // namespace
}  // namespace deep_ep::test
