#include "tests/rxe/machine_ranks.hpp"

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "csrc/bootstrap/socket.hpp"
#include "deep_ep/buffer.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/member.hpp"
#include "tests/rxe/low_latency_ranks.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

constexpr std::uint16_t kPort = 18601;
constexpr int kHere = 2;  // ranks on a machine
constexpr int kRanks = 2 * kHere;

/// A buffer can be made over both machines, but its normal mode is for one.
void expect_normal_mode_is_refused(const std::shared_ptr<Bootstrap>& bootstrap) {
  const auto executor = make_host_executor();
  const StreamHandle stream = executor->create_stream();
  Buffer buffer(bootstrap, executor, {.heap_bytes = std::size_t{16} << 20});
  std::vector<std::uint16_t> rows(64);
  std::vector<std::int64_t> experts{0};
  const auto topk_idx = TensorView::contiguous(experts.data(), DType::int64, {1, 1}, executor->device());
  DispatchArguments arguments;
  arguments.x = TensorView::contiguous(rows.data(), DType::bfloat16, {1, 64}, executor->device());
  arguments.use(buffer.get_dispatch_layout(topk_idx, 2 * kRanks, {.stream = stream, .previous_event = {}}));
  std::string refusal = "nothing";
  try {
    buffer.dispatch(arguments, {.stream = stream, .previous_event = {}});
  } catch (const InvalidArgument& error) {
    refusal = error.what();
  }
  const int far = bootstrap->rank() < kHere ? kHere : 0;
  const std::string expected = fmt::format(
      "Buffer::dispatch is for ranks of one node, but there are 2 nodes, and rank {} is on another one than rank {}",
      far, bootstrap->rank());
  if (!refusal.starts_with(expected)) throw std::runtime_error("dispatch threw: " + refusal);
  buffer.destroy();
  executor->destroy_stream(stream);
}

void run_rank(const std::shared_ptr<Bootstrap>& bootstrap) {
  expect_normal_mode_is_refused(bootstrap);
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
