#include "csrc/memory/heap_choice.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"

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
    ranks[rank].bytes = 1000;
    ranks[rank].granularity = 512;
  }
  return ranks;
}

void move_to_other_host(HeapCapabilities& rank) {
  write(rank.process.boot_id, "boot-b");
  write(rank.process.host, "beta");
}

std::string refusal(const std::vector<HeapCapabilities>& ranks) {
  try {
    plan_heap(ranks);
  } catch (const SystemError& error) {
    return error.what();
  }
  return "";
}

TEST(HeapChoice, OneHostSharesFileDescriptors) {
  const HeapPlan plan = plan_heap(ranks_on_one_host(8));
  EXPECT_EQ(plan.kind, HeapKind::posix_fd);
  EXPECT_EQ(plan.bytes, 1024u);
  auto with_fabric = ranks_on_one_host(8);
  for (auto& rank : with_fabric) rank.fabric = true;
  EXPECT_EQ(plan_heap(with_fabric).kind, HeapKind::posix_fd) << "whether or not there is anything else";
}

TEST(HeapChoice, TheCoarsestGranularityCounts) {
  auto ranks = ranks_on_one_host(3);
  ranks[2].granularity = 4096;
  EXPECT_EQ(plan_heap(ranks).bytes, 4096u);
  for (auto& rank : ranks) rank.bytes = 0;
  EXPECT_EQ(plan_heap(ranks).bytes, 4096u);
}

TEST(HeapChoice, FabricAcrossHosts) {
  auto ranks = ranks_on_one_host(4);
  move_to_other_host(ranks[3]);
  for (auto& rank : ranks) rank.fabric = true;
  EXPECT_EQ(plan_heap(ranks).kind, HeapKind::fabric);
}

TEST(HeapChoice, IpcWhereOneGpuOrTheNetworkForbidsDescriptors) {
  auto ranks = ranks_on_one_host(4);
  ranks[1].posix_fd = false;
  EXPECT_EQ(plan_heap(ranks).kind, HeapKind::cuda_ipc);
  ranks = ranks_on_one_host(4);
  ranks[2].process.network_namespace = 8;  // containers with separate networks
  EXPECT_EQ(plan_heap(ranks).kind, HeapKind::cuda_ipc);
}

TEST(HeapChoice, WithoutFabricEachHostSharesForItself) {
  auto ranks = ranks_on_one_host(4);
  move_to_other_host(ranks[2]);
  move_to_other_host(ranks[3]);
  ranks[3].process.network_namespace = ranks[2].process.network_namespace = 9;
  const HeapPlan plan = plan_heap(ranks);
  EXPECT_EQ(plan.kind, HeapKind::posix_fd);
  EXPECT_TRUE(shares_memory(plan.kind, ranks[2], ranks[3]));
  EXPECT_FALSE(shares_memory(plan.kind, ranks[0], ranks[3]));
  EXPECT_TRUE(shares_memory(HeapKind::fabric, ranks[0], ranks[3]));
  EXPECT_FALSE(shares_memory(HeapKind::cuda_ipc, ranks[0], ranks[3]));
  ranks[3].process.network_namespace = 10;
  EXPECT_EQ(plan_heap(ranks).kind, HeapKind::cuda_ipc);
}

TEST(HeapChoice, ForcedKindNamesTheRankThatCannot) {
  auto ranks = ranks_on_one_host(3);
  for (auto& rank : ranks) rank.requested = HeapKind::fabric;
  ranks[0].fabric = true;
  EXPECT_NE(refusal(ranks).find("GPU 1 of rank 1"), std::string::npos) << refusal(ranks);
  for (auto& rank : ranks) rank.requested = HeapKind::posix_fd;
  ranks[2].posix_fd = false;
  EXPECT_NE(refusal(ranks).find("GPU 2 of rank 2"), std::string::npos) << refusal(ranks);
  ranks = ranks_on_one_host(3);
  ranks[1].process.network_namespace = 8;
  for (auto& rank : ranks) rank.requested = HeapKind::posix_fd;
  EXPECT_NE(refusal(ranks).find("rank 1 and rank 0 (host alpha) are not in one network namespace"), std::string::npos)
      << refusal(ranks);
  for (auto& rank : ranks) rank.requested = HeapKind::cuda_ipc;
  EXPECT_EQ(plan_heap(ranks).kind, HeapKind::cuda_ipc);
}

TEST(HeapChoice, RanksThatAskForDifferentThingsAreRefused) {
  auto ranks = ranks_on_one_host(2);
  ranks[1].bytes = 2000;
  EXPECT_THROW(plan_heap(ranks), RankMismatch);
  ranks = ranks_on_one_host(2);
  ranks[1].requested = HeapKind::cuda_ipc;
  EXPECT_THROW(plan_heap(ranks), RankMismatch);
}

TEST(ProcessIdentity, ThreadsShareItAndItNamesThisHost) {
  const ProcessIdentity here = this_process();
  EXPECT_TRUE(here.same_process(this_process()));
  EXPECT_NE(here.boot_id[0], '\0');
  ProcessIdentity other = here;
  other.token += 1;
  EXPECT_FALSE(here.same_process(other));
  EXPECT_TRUE(here.same_network(other));
}

TEST(ProcessIdentity, AForkedChildIsAnotherProcess) {
  const ProcessIdentity parent = this_process();
  expect_nothing_thrown(run_processes(1, [&](int) {
    if (this_process().same_process(parent)) throw std::runtime_error("the child takes itself for its parent");
  }));
}

}  // namespace
}  // namespace deep_ep
