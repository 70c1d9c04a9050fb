// A cable that goes down below connections. Runs after the other tests: addresses and routes suffer.
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/member.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rxe/rxe_settings.hpp"

namespace deep_ep::test {
namespace {

void shell(const std::string& command) {
  if (std::system(("bash -c '. /guest/guest_network.sh; " + command + "'").c_str()) != 0) {
    throw std::runtime_error(command);
  }
}

TEST(RxeLinkConnections, ADeadLinkIsReportedAndARepairedOneReconnects) {
  expect_ranks_succeed(2, [](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    Member member(bootstrap, make_host_executor());
    member.connect({.peers = {1 - rank}, .depth = 64}, quick_settings());
    member.exchange_rows(0);
    bootstrap->barrier();
    if (rank == 0) shell("ip link set v1 down");
    bootstrap->barrier();
    member.launch(0, 1);
    if (member.fault().kind != FaultKind::rdma_failed) throw std::runtime_error("no failure is on record");
    try {
      member.connections->check();
      throw std::runtime_error("nothing is reported");
    } catch (const SystemError& error) {
      // Rank 1's own port is down: soft-RoCE refuses what it posts.
      const char* syndrome = rank == 0 ? "syndrome 0x15, transport retries exceeded" : "syndrome 0x02";
      if (!contains(error.what(), "to rank " + std::to_string(1 - rank)) || !contains(error.what(), syndrome)) throw;
    }
    bootstrap->barrier();
    if (rank == 0) shell("cable_up; wait_for_gid rxe0; wait_for_gid rxe1");
    bootstrap->barrier();
    member.connections->reconnect(*bootstrap);
    member.start_again();
    member.exchange_rows(0);
    bootstrap->barrier();
  });
}

}  // namespace
}  // namespace deep_ep::test
