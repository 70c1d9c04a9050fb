// Connections between ranks of this process over the `local` wire.
#include "csrc/rdma/connections.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/member.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep::test {
namespace {

using rdma::ConnectionOptions;

// It forks processes, which must happen before this one has threads: GoogleTest runs suites of this ending first.

TEST(ConnectionsOfProcessesDeathTest, TheEndDoesNotWaitForRanksThatDied) {
  const auto errors = run_rank_processes(3, [](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    Member member(bootstrap, make_host_executor(), /*timeout_s=*/0.5);
    member.connect({.peers = member.nodes(1).reached_by_rdma(true), .channels = 2, .depth = 64});
    if (rank == 1) ::_exit(3);
    // Waits for rank 1's rows in vain; rank 1's heap is still mapped, so sending to it succeeds.
    member.launch(0, 1);
    if (member.fault().kind != FaultKind::timeout) throw std::runtime_error("a row came from a dead rank");
    if (!member.connections->drain(long_patience()))
      throw std::runtime_error("what was sent to the dead rank is not done");
    member.connections->check();
  });
  EXPECT_EQ(errors[0] + errors[2], "");
  EXPECT_TRUE(contains(errors[1], "process ended with status"));
}

struct Where {
  const char* name;
  bool gpu;
  const char* wire;
  const char* handler = "auto";
};

std::shared_ptr<Executor> executor_at(const Where& where, int rank) {
  return where.gpu ? make_cuda_executor(rank % cuda_device_count()) : make_host_executor();
}

class ConnectionsTest : public testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    if (GetParam().gpu && cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  }

 private:
  Setting wire_{"DEEP_EP_RDMA_WIRE", GetParam().wire};
  Setting handler_{"DEEP_EP_NIC_HANDLER", GetParam().handler};
};
INSTANTIATE_TEST_SUITE_P(, ConnectionsTest,
                         testing::Values(Where{"Cpu", false, "local"}, Where{"Gpu", true, "local"},
                                         Where{"CpuSimulated", false, "simulated"},
                                         Where{"GpuSimulated", true, "simulated"},
                                         Where{"CpuDoorbell", false, "simulated", "doorbell"},
                                         Where{"GpuDoorbell", true, "simulated", "doorbell"}),
                         [](const auto& info) { return info.param.name; });

TEST_P(ConnectionsTest, EveryRankReachesAllOthersOnEveryChannel) {
  expect_ranks_succeed(4, [](const auto& bootstrap) {
    Member member(bootstrap, executor_at(GetParam(), bootstrap->rank()));
    member.connect({.peers = member.nodes(0).reached_by_rdma(/*use_nvlink=*/false), .channels = 3, .depth = 64});
    for (int channel = 0; channel < 3; ++channel) member.exchange_rows(channel);
    bootstrap->barrier();
  });
}

/// Of five channels two go by the second NIC.
TEST(ConnectionsOfSeveralNicsTest, ChannelsGoByThemInTurn) {
  const Setting wire("DEEP_EP_RDMA_WIRE", "local");
  expect_ranks_succeed(3, [](const auto& bootstrap) {
    Member member(bootstrap, make_host_executor());
    member.connect({.peers = member.nodes(1).reached_by_rdma(true), .channels = 5, .depth = 64}, {}, 2);
    for (int channel = 0; channel < 5; ++channel) member.exchange_rows(channel);
    std::set<std::uint32_t> numbers;  // each NIC counts its queue pairs from 1
    for (int channel = 0; channel < 5; ++channel) {
      numbers.insert(member.connections->device_peers()[3 * channel + (bootstrap->rank() + 1) % 3].number);
    }
    if (numbers.size() != 3) throw std::runtime_error("queue pairs of one NIC");
    if (!contains(member.connections->describe(), "wire local and handler")) throw std::runtime_error("one NIC");
    bootstrap->barrier();
  });
}

TEST(ConnectionsScheduleTest, EverySeedBringsAllRows) {
  const Setting wire("DEEP_EP_RDMA_WIRE", "local");
  for (std::uint64_t seed = 10; seed < (DEEP_EP_TSAN ? 40u : 100u); seed += 10) {
    expect_ranks_succeed(2, [&](const auto& bootstrap) {
      const int rank = bootstrap->rank();
      Member member(bootstrap, make_host_executor({.seed = seed + static_cast<std::uint64_t>(rank)}));
      member.connect({.peers = {1 - rank}, .depth = 64});
      // The second launch finds the queue pairs as the first one left them.
      for (int launch = 0; launch < 2; ++launch) member.exchange_rows(0, 4);
      bootstrap->barrier();
    });
  }
}

TEST_P(ConnectionsTest, FailedQueuePairsWorkAgainAfterReconnect) {
  expect_ranks_succeed(2, [](const auto& bootstrap) {
    Member member(bootstrap, executor_at(GetParam(), bootstrap->rank()));
    member.connect({.peers = {1 - bootstrap->rank()}, .depth = 64});
    const RdmaQueuePair* table = member.connections->device_peers();
    member.exchange.astray = std::uint64_t{1} << 40;
    member.launch(0, 1);
    if (member.fault().kind != FaultKind::rdma_failed) throw std::runtime_error("no fault on record");
    std::string said = member.connections->health();
    if (!GetParam().gpu) {  // GPUs alone look at completions in their memory
      try {
        member.connections->check();
        said = "nothing was reported";
      } catch (const SystemError& error) {
        said = error.what();
      }
    }
    const std::string expected =
        "to rank " + std::to_string(1 - bootstrap->rank()) + " over wire " + GetParam().wire + " failed";
    if (!contains(said, expected)) throw std::runtime_error(said);
    member.connections->reconnect(*bootstrap);
    if (member.connections->device_peers() != table) throw std::runtime_error("the table has moved");
    member.start_again();
    member.exchange_rows(0, 2);
    bootstrap->barrier();
    member.connections->check();
  });
}

}  // namespace
}  // namespace deep_ep::test
