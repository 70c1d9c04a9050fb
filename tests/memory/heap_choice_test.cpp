#include "csrc/memory/heap_choice.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep {
namespace {

template <std::size_t n>
void write(std::array<char, n>& field, std::string_view text) {
  field = {};
  std::copy(text.begin(), text.end(), field.begin());
}

std::vector<HeapCapabilities> ranks_on_one_host(int count) {
  std::vector<HeapCapabilities> ranks(static_cast<std::size_t>(count));
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    write(ranks[rank].process.boot_id, "boot-a");
    write(ranks[rank].process.host, "alpha");
    ranks[rank].process.network_namespace = 7;
    ranks[rank].process.token = 100 + rank;
    ranks[rank].device = static_cast<std::int32_t>(rank);
    ranks[rank].posix_fd = true;
    ranks[rank].granularity = 512;
  }
  return ranks;
}

void move_to_other_host(HeapCapabilities& rank) {
  write(rank.process.boot_id, "boot-b");
  write(rank.process.host, "beta");
}

std::string refusal(const std::vector<HeapCapabilities>& ranks) {
  return test::message_of<SystemError>([&] { choose_heap(ranks); });
}

TEST(HeapChoice, OneHostSharesFileDescriptors) {
  EXPECT_EQ(choose_heap(ranks_on_one_host(8)), HeapKind::posix_fd);
  EXPECT_EQ(heap_bytes(HeapKind::posix_fd, ranks_on_one_host(8), [](auto) { return 1000; }), 1024u);
  auto with_fabric = ranks_on_one_host(8);
  for (auto& rank : with_fabric) rank.fabric = true;
  EXPECT_EQ(choose_heap(with_fabric), HeapKind::posix_fd) << "whether or not there is anything else";
}

TEST(HeapChoice, FabricWhereOneGpuOrTheNetworkForbidsDescriptors) {
  auto gpu = ranks_on_one_host(4);
  gpu[1].posix_fd = false;
  EXPECT_NE(refusal(gpu).find("GPU 1 of rank 1"), std::string::npos) << refusal(gpu);
  auto network = ranks_on_one_host(4);
  network[2].process.network_namespace = 8;  // containers with separate networks
  EXPECT_NE(refusal(network).find("rank 2 and rank 0 (host alpha) are not in one network namespace"), std::string::npos)
      << refusal(network);
  for (auto* ranks : {&gpu, &network}) {
    for (auto& rank : *ranks) rank.fabric = true;
    EXPECT_EQ(choose_heap(*ranks), HeapKind::fabric);
    ranks->back().fabric = false;
    EXPECT_NE(refusal(*ranks), "");
  }
}

TEST(HeapChoice, WithoutFabricEachHostSharesForItself) {
  auto ranks = ranks_on_one_host(4);
  move_to_other_host(ranks[2]);
  move_to_other_host(ranks[3]);
  ranks[3].process.network_namespace = ranks[2].process.network_namespace = 9;
  const HeapKind kind = choose_heap(ranks);
  EXPECT_EQ(kind, HeapKind::posix_fd);
  EXPECT_TRUE(shares_memory(kind, ranks[2], ranks[3]));
  EXPECT_FALSE(shares_memory(kind, ranks[0], ranks[3]));
  EXPECT_TRUE(shares_memory(HeapKind::fabric, ranks[0], ranks[3]));
}

TEST(ProcessIdentity, AForkedChildIsAnotherProcess) {
  const ProcessIdentity parent = this_process();
  expect_nothing_thrown(run_processes(1, [&](int) {
    if (this_process().same_process(parent)) throw std::runtime_error("the child takes itself for its parent");
  }));
}

}  // namespace
}  // namespace deep_ep
