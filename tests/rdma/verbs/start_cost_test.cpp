// What it costs a rank of a large job to make and connect its queue pairs of the handler `gpu`: calls of the device,
// counted, and the library's own time, printed. Nothing is sent.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "csrc/rdma/verbs/nic_ends.hpp"
#include "deep_ep/executor.hpp"
#include "tests/rdma/verbs/devx/fake_pages.hpp"
#include "tests/rdma/verbs/fake_heap.hpp"
#include "tests/rdma/verbs/fake_verbs.hpp"

namespace deep_ep::rdma::verbs {
namespace {

constexpr int kChannelsAPeer = 3;
constexpr int kRanksPerNode = 8;

/// Calls of the device, by name; firmware commands by their opcode.
std::map<std::string, long> calls_of(const test::FakeVerbs& fake) {
  std::map<std::string, long> calls;
  for (const std::string& call : fake.calls) ++calls[call];
  for (const auto& command : fake.commands) {
    char name[16];
    std::snprintf(name, sizeof name, "%#x", command.opcode());
    ++calls[name];
  }
  return calls;
}

TEST(StartCost, OfAQueuePairIsSevenCallsOfTheDeviceAndNoMore) {
  for (const int ranks : {64, 256}) {
    test::FakeVerbs fake;
    alignas(test::kMachinePage) static std::byte registers[2 * test::kMachinePage];
    fake.uar.reg_addr = registers;
    fake.uar.base_addr = registers;
    test::FakePages pages{test::kMachinePage};
    NicAccess nic;
    nic.device = Device::open("fake_0", fake.functions);
    nic.path = {.port = 1, .gid_index = 3};
    nic.name = "fake_0:1";
    nic.mlx5 = nic.gpu_memory = true;
    nic.exporter = [](void*, std::size_t) { return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); };
    nic.mlx5_functions = [&]() -> const Mlx5Functions& { return fake.mlx5; };
    nic.page_mapper = pages.mapper();
    const auto heap = std::make_unique<test::FakeHeap>();
    const long far = ranks - kRanksPerNode;
    EndsOptions options{.peers = {}, .depth = 64, .batch = 32};
    for (int channel = 0; channel < kChannelsAPeer; ++channel) {
      for (int peer = kRanksPerNode; peer < ranks; ++peer) options.peers.push_back(peer);
    }

    const auto begin = std::chrono::steady_clock::now();
    const auto ends = make_nic_ends(nic, make_host_executor(), *heap, options);
    for (std::size_t end = 0; end < options.peers.size(); ++end) {
      QueuePairAddress peer = ends->address(end);
      peer.gid[14] = static_cast<std::uint8_t>(options.peers[end] / kRanksPerNode);
      peer.gid[15] = static_cast<std::uint8_t>(options.peers[end] % kRanksPerNode);
      ends->connect(end, peer);
    }
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;

    EXPECT_EQ(ends->describe(), "handler gpu, rings in dma-buf, NIC fake_0:1, heap registered as dma-buf");
    const long pairs = far * kChannelsAPeer;
    std::map<std::string, long> calls = calls_of(fake);
    for (const char* each : {"0x400", "0x500", "0x502", "0x503", "0x504"}) EXPECT_EQ(calls[each], pairs) << each;
    EXPECT_EQ(calls["alloc_uar dedicated"], pairs + 1) << "one to try whether kernels can ring";
    EXPECT_EQ(calls["create_ah"], far) << "one a peer, whatever the channels";
    EXPECT_EQ(calls["0x100"], 2) << "capabilities";
    EXPECT_EQ(calls["query_eqn"], 1);
    EXPECT_EQ(calls["umem_reg_ex dma-buf"], 1) << "rings are registered together";
    EXPECT_EQ(calls["subscribe_event"], pairs);
    EXPECT_EQ(static_cast<long>(fake.commands.size()), 5 * pairs + 4) << "nothing else is asked";
    std::printf(
        "%d ranks, %ld queue pairs: %zu firmware commands; the library itself took %.0f ms, with a device that "
        "takes no time\n",
        ranks, pairs, fake.commands.size(), took.count());
  }
}

}  // namespace
}  // namespace deep_ep::rdma::verbs
