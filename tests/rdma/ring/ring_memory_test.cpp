// Memory of rings as kernels, handlers and devices must find it.
#include "csrc/rdma/ring/ring_memory.hpp"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "csrc/topology/memory_place.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "tests/cluster/counting_executor.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep::rdma {
namespace {

using deep_ep::test::message_of;

TEST(RingMemoryTest, RefusesWhatNoRingCanBe) {
  const auto refusal = [](const RingOptions& options) {
    return message_of<InvalidArgument>([&] { RingMemory(make_host_executor(), options); });
  };
  for (const std::uint32_t depth : {0u, 32u, 63u, 100u, 65536u}) {
    EXPECT_EQ(refusal({.depth = depth}),
              "queue pair depth " + std::to_string(depth) + ", allowed: a power of two from 64 to 32768");
  }
  EXPECT_EQ(refusal({.batch = 0}), "doorbell batch 0, allowed: 1 to 512 (half the depth)");
  EXPECT_EQ(refusal({.depth = 64, .batch = 33}), "doorbell batch 33, allowed: 1 to 32 (half the depth)");
}

/// Where the calling thread's memory comes from; nothing where the system does not say.
struct MemoryPolicy {
  int mode = -1;
  unsigned long nodes = 0;  ///< the first ones
  bool operator==(const MemoryPolicy&) const = default;

  static std::optional<MemoryPolicy> now() {
    MemoryPolicy policy;
    std::array<unsigned long, 16> nodes{};
    if (::syscall(SYS_get_mempolicy, &policy.mode, nodes.data(), 8 * sizeof nodes, nullptr, 0UL) != 0) return {};
    policy.nodes = nodes[0];
    return policy;
  }
};

/// Notes the policy under which pinned memory is allocated.
class NotingExecutor final : public test::CountingExecutor {
 public:
  using CountingExecutor::CountingExecutor;
  std::vector<MemoryPolicy> pinned;
  void* allocate_pinned(std::size_t bytes) override {
    pinned.push_back(MemoryPolicy::now().value_or(MemoryPolicy{}));
    return CountingExecutor::allocate_pinned(bytes);
  }
};

TEST(RingMemoryTest, ComesFromTheNodeOfTheNic) {
  const std::optional<MemoryPolicy> before = MemoryPolicy::now();
  if (!before) GTEST_SKIP() << "this system has no memory policies";
  const MemoryPolicy near{MPOL_PREFERRED, 1};
  {
    const topology::MemoryNear node_0(0);
    if (MemoryPolicy::now() != near) GTEST_SKIP() << "this process may not choose where its memory comes from";
  }
  EXPECT_EQ(MemoryPolicy::now(), before);
  for (const int node : {0, -1, 1 << 20}) {
    const auto executor = std::make_shared<NotingExecutor>(make_host_executor());
    const RingMemory rings(executor, {.count = 2, .numa_node = node});
    EXPECT_EQ(executor->pinned, std::vector<MemoryPolicy>(2, node == 0 ? near : *before))
        << node << ": rings and sinks";
    EXPECT_EQ(MemoryPolicy::now(), before) << "the thread's other memory comes from where it did";
  }
}

}  // namespace
}  // namespace deep_ep::rdma
