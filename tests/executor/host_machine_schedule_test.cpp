// Order of threads under seeded schedules.
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace deep_ep::test
