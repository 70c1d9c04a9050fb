// Memory of rings as kernels, handlers and devices must find it.
#include "csrc/rdma/ring/ring_memory.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
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

}  // namespace
}  // namespace deep_ep::rdma
