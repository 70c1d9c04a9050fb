// Connections over real RoCE devices: kernels of the CPU executor write rings, `cpu` handlers post them to the devices.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/rdma/ring/failure.hpp"
#include "csrc/support/deadline.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/cluster.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/member.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rxe/rxe_settings.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

/// The text of the SystemError that the connections report.
std::string reported(const rdma::Connections& connections) {
  try {
    connections.check();
  } catch (const SystemError& error) {
    return error.what();
  }
  return "";
}

/// What the kernel has put on record.
std::string told(const Member& member, int rank) {
  const FaultRecord& fault = member.fault();
  const std::string kind = "fault of kind " + std::to_string(static_cast<int>(fault.kind));
  return fault.kind == FaultKind::rdma_failed ? kind + ": " + rdma::describe_fault(rank, fault) : kind;
}

void wait_until_dead(std::int64_t process) {
  const Deadline deadline(long_patience());
  while (!deadline.expired()) {
    std::ifstream file("/proc/" + std::to_string(process) + "/stat");
    std::string line;
    if (!std::getline(file, line) || contains(line, ") Z ")) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  throw std::runtime_error("the process lives on");
}

// Comes first in its program: processes are forked before this one has threads.
TEST(RxeConnectionsFault, PeerThatIsKilledIsNamed) {
  const auto errors = run_rank_processes(2, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    Member member(bootstrap, make_host_executor(), /*timeout_s=*/patience());
    member.connect({.peers = {1 - rank}, .depth = 64}, quick_settings());
    member.exchange_rows(0, 1);
    const auto processes = all_gather_values(*bootstrap, std::int64_t{::getpid()});
    if (rank == 1) ::raise(SIGKILL);
    wait_until_dead(processes[1]);
    member.launch(0, 1);
    // The device may take the first rows while it ends the dead process's queue pair. The others then fit the ring, and
    // the kernel waits for the answer, and for nothing else.
    const FaultRecord& fault = member.fault();
    require(fault.kind == FaultKind::rdma_failed || (fault.kind == FaultKind::timeout && fault.peer == 1),
            told(member, rank));
    const std::string text = reported(*member.connections);
    require(contains(text, "to rank 1 over rxe0:1 failed") && contains(text, "syndrome 0x15"), text);
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_NE(errors[1], "");  // killed
}

TEST(RxeConnectionsFault, WrongRemoteKey) {
  expect_ranks_succeed(2, [](const auto& bootstrap) {
    const bool wrong = bootstrap->rank() == 0;
    Member member(bootstrap, make_host_executor(), /*timeout_s=*/wrong ? long_patience() : scaled(2));
    member.connect({.peers = {1 - bootstrap->rank()}, .depth = 64}, patient_settings());
    Shared<RdmaQueuePair> peers(*member.executor, 2);
    peers[1 - bootstrap->rank()] = member.connections->device_peers()[1 - bootstrap->rank()];
    if (wrong) peers[1].remote_key ^= 1;
    member.launch(peers.data(), 1);
    const std::string text = reported(*member.connections);
    if (wrong) {
      require(member.fault().kind == FaultKind::rdma_failed, told(member, 0));
      require(contains(text, "RDMA write to rank 1 over rxe0:1 failed"), text);
      require(contains(text, "syndrome 0x13, remote access error"), text);
    } else {
      // Its own rows may have been through before, and those of rank 0 never come.
      require(member.fault().claimed != 0, "no fault is on record");
    }
    bootstrap->barrier();
  });
}

TEST(RxeConnections, EachRankHasADevice) {
  for (const int gid_index : {0, 1}) {  // IPv6, IPv4
    expect_ranks_succeed(2, [&](const auto& bootstrap) {
      Member member(bootstrap, make_host_executor());
      rdma::RdmaSettings settings = patient_settings();
      settings.gid_index = {std::to_string(gid_index), "DEEP_EP_RDMA_GID_INDEX"};
      member.connect({.peers = {1 - bootstrap->rank()}, .channels = 3, .depth = 64}, settings);
      const std::string device = bootstrap->rank() == 0 ? "rxe0:1" : "rxe1:1";
      require(contains(member.connections->describe(), "handler cpu, wire verbs, NIC " + device),
              member.connections->describe());
      for (int round = 0; round < 3; ++round) {
        for (int channel = 0; channel < 3; ++channel) member.exchange_rows(channel);
      }
      bootstrap->barrier();
    });
  }
}

}  // namespace
}  // namespace deep_ep::test
