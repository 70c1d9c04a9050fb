// Order of threads under the fixed and under seeded schedules.
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <vector>

#include "kernels/primitives/block.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/executor/host_kernel.hpp"

namespace deep_ep::test {
namespace {

using namespace deep_ep::device;

/// The order in which 64 threads first run.
std::vector<int> order_under(std::uint64_t seed) {
  Machine machine(seed);
  std::vector<int> order(64);
  std::uint32_t next = 0;
  machine.run({1, 64, 0}, [&](std::byte*) { order[fetch_add_relaxed<Scope::block>(&next, 1)] = thread_index(); });
  return order;
}

TEST(HostSchedule, SeedZeroRunsThreadsInOrder) {
  std::vector<int> ascending(64);
  std::iota(ascending.begin(), ascending.end(), 0);
  EXPECT_EQ(order_under(0), ascending);
}

TEST(HostSchedule, SeedsGiveDifferentOrdersAndRepeatThemselves) {
  std::set<std::vector<int>> seen;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const auto order = order_under(seed);
    EXPECT_EQ(order, order_under(seed)) << "seed " << seed;
    seen.insert(order);
  }
  EXPECT_EQ(seen.size(), 20u);
}

TEST(HostSchedule, LaunchesOfOneStreamHaveDifferentSchedules) {
  Machine machine(7);
  std::set<std::vector<int>> seen;
  for (int i = 0; i < 10; ++i) {
    std::vector<int> order(64);
    std::uint32_t next = 0;
    machine.run({1, 64, 0}, [&](std::byte*) { order[fetch_add_relaxed<Scope::block>(&next, 1)] = thread_index(); });
    seen.insert(order);
  }
  EXPECT_EQ(seen.size(), 10u);
}

TEST(HostSchedule, AllBlocksAreResident) {
  // Block 0 waits for the last of more blocks than there can be workers.
  constexpr int kBlocks = DEEP_EP_TSAN ? 40 : 200;  // ThreadSanitizer is slow to register a thread
  Machine machine;
  std::uint64_t arrived = 0;
  machine.run({kBlocks, 32, 0}, [&](std::byte*) {
    if (thread_index() != 0) return;
    add_release<Scope::gpu>(&arrived, 1);
    for (int spins = 0; load_acquire<Scope::gpu>(&arrived) < kBlocks; ++spins) pause(spins);
  });
  EXPECT_EQ(arrived, std::uint64_t{kBlocks});
}

TEST(HostSchedule, ShapesAreChecked) {
  Machine machine;
  const auto nothing = [](std::byte*) {};
  EXPECT_THROW(machine.run({0, 32, 0}, nothing), InvalidArgument);
  EXPECT_THROW(machine.run({1, 33, 0}, nothing), InvalidArgument);
  EXPECT_THROW(machine.run({1, 2048, 0}, nothing), InvalidArgument);
  EXPECT_THROW(machine.run({1, 32, 1 << 30}, nothing), InvalidArgument);
  EXPECT_NO_THROW(machine.run({1, 1024, 65536}, nothing));
}

}  // namespace
}  // namespace deep_ep::test
