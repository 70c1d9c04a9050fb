// The device's send queue against devices that do everything they are allowed to do.
#include "tests/rdma/ring/traffic.hpp"

#include <gtest/gtest.h>

#include "tests/rdma/ring/queue_world.hpp"

namespace deep_ep::test {
namespace {

constexpr bool kSanitized = DEEP_EP_TSAN || DEEP_EP_ASAN;

std::string outcome(const QueueWorldOptions& options, std::uint64_t operations) {
  QueueWorld world(options);
  Traffic traffic(world, options.seed + 1000);
  traffic.run(operations);
  if (!world.nic().violation().empty()) return world.nic().violation();
  return traffic.verdict();
}

class RdmaTrafficOn : public testing::TestWithParam<Behind> {};
INSTANTIATE_TEST_SUITE_P(, RdmaTrafficOn, testing::Values(Behind::software_nic, Behind::cpu_handler),
                         [](const auto& info) {
                           return info.param == Behind::software_nic ? "SoftwareNic" : "CpuHandler";
                         });

TEST_P(RdmaTrafficOn, EveryBatchSize) {
  for (const std::uint32_t batch : {1u, 2u, 3u, 31u, 32u, 63u, 64u}) {
    EXPECT_EQ(outcome({.behind = GetParam(), .seed = batch, .queue_pairs = 2, .batch = batch}, 4000), "")
        << "batch " << batch;
  }
}

TEST_P(RdmaTrafficOn, WrapsAtEveryIndex) {
  // Ring and 16-bit counter wrap at another moment of the same traffic for every start.
  const std::uint64_t step = kSanitized ? 17 : 1;
  for (std::uint64_t start = 0; start < 130; start += step) {
    for (const std::uint64_t base : {std::uint64_t{0}, std::uint64_t{0x10000} - 300, (std::uint64_t{7} << 16) - 65}) {
      ASSERT_EQ(outcome({.behind = GetParam(), .seed = start, .first_index = base + start}, 500), "")
          << "first index " << base + start;
    }
  }
}

TEST_P(RdmaTrafficOn, ShallowAndDeepRings) {
  for (const std::uint32_t depth : {64u, 1024u, 32768u}) {
    // The deepest ring wraps once even so, except under ThreadSanitizer, which sees no more there than at 1024 entries.
    EXPECT_EQ(outcome({.behind = GetParam(), .seed = depth, .depth = depth, .first_index = 0xfff0},
                      200'000 / (DEEP_EP_TSAN ? 16
                                 : kSanitized ? 4
                                              : 1)),
              "")
        << "depth " << depth;
  }
}

TEST_P(RdmaTrafficOn, ManySeeds) {
  for (std::uint64_t seed = 100; seed < (kSanitized ? 110 : 200); ++seed) {
    ASSERT_EQ(outcome({.behind = GetParam(), .seed = seed, .queue_pairs = 4, .batch = 8}, 2000), "") << "seed " << seed;
  }
}

TEST(RdmaTraffic, LostDoorbellsAreRecoveredFromTheRecord) {
  EXPECT_EQ(outcome({.seed = 21, .queue_pairs = 2, .nic = {.loses_doorbells = true}}, 20000), "");
}

}  // namespace
}  // namespace deep_ep::test
