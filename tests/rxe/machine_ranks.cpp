#include "tests/rxe/machine_ranks.hpp"

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "tests/cluster/processes.hpp"
#include "tests/rdma/member.hpp"
#include "tests/rxe/low_latency_ranks.hpp"
#include "tests/rxe/normal_mode_ranks.hpp"
#include "tests/support/time_scale.hpp"
#include "tools/common/socket_bootstrap.hpp"

namespace deep_ep::test {
namespace {

constexpr std::uint16_t kPort = 18601;
constexpr int kHere = 2;  // ranks on a machine
constexpr int kRanks = 2 * kHere;

void run_rank(const std::shared_ptr<Bootstrap>& bootstrap) {
  Member member(bootstrap, make_host_executor());
  const NodeMembership nodes = member.nodes(0);
  if (nodes.node != std::vector<int>{0, 0, 1, 1}) {
    throw std::runtime_error(fmt::format("the ranks' nodes are {}", fmt::join(nodes.node, ", ")));
  }
  member.connect({.peers = nodes.reached_by_rdma(true), .channels = 2, .depth = 64});
  if (member.connections->describe() !=
      "2 peers x 2 channels, handler cpu, wire verbs, NIC rxe0:1, heap registered as host memory") {
    throw std::runtime_error(member.connections->describe());
  }
  for (int round = 0; round < 2; ++round) {
    for (int channel = 0; channel < 2; ++channel) member.exchange_rows(channel);
  }
  bootstrap->barrier();  // nobody's memory goes away while somebody writes to it
  run_low_latency_calls(bootstrap);
  run_normal_mode(bootstrap, kHere);
}

}  // namespace

void run_machine_ranks(int machine, const std::string& other_machine) {
  const std::string hub = machine == 0 ? "127.0.0.1" : other_machine;
  const std::vector<std::string> thrown = run_threads(kHere, [&](int local) {
    run_rank(make_socket_bootstrap(machine * kHere + local, kRanks, hub, kPort, long_patience()));
  });
  for (int local = 0; local < kHere; ++local) {
    const std::string& text = thrown[static_cast<std::size_t>(local)];
    if (!text.empty()) throw std::runtime_error(fmt::format("rank {}: {}", machine * kHere + local, text));
  }
}

}  // namespace deep_ep::test
