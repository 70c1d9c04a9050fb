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
INSTANTIATE_TEST_SUITE_P(, RdmaTrafficOn, testing::Values(Behind::software_nic, Behind::bells, Behind::cpu_handler),
                         [](const auto& info) { return name_of(info.param); });

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
  for (const Behind behind : {Behind::software_nic, Behind::bells}) {
    EXPECT_EQ(outcome({.behind = behind, .seed = 21, .queue_pairs = 2, .nic = {.loses_doorbells = true}}, 20000), "");
  }
}

/// The queue of bells goes round at 256 and the device's index at 65536, with the thread away meanwhile.
TEST(RdmaBells, WaitWhereverQueueAndIndexWrap) {
  QueueWorld world({.behind = Behind::bells, .queue_pairs = 2, .depth = 128, .batch = 1, .first_index = 0xffc0});
  for (int lap = 0; lap < 5; ++lap) {
    world.run([&](auto& peers) {
      for (int i = 0; i < 200; ++i) {
        // The fullest that the queue can be: all entries of both rings have a bell each, and none is read.
        EXPECT_TRUE(peers[static_cast<std::size_t>(i % 2)]->put(0, 0, 8));
      }
      for (auto& peer : peers) EXPECT_TRUE(peer->quiet());
    });
  }
  EXPECT_FALSE(world.bells().lost());
  EXPECT_EQ(world.nic().violation(), "");
  for (const std::size_t ring : {0, 1}) {
    EXPECT_EQ(world.doorbell_register(ring), device::rdma::doorbell_word(0xffc0 + 500, QueueWorld::number(ring)));
  }
}

/// Queue pairs and bells without a device, and a thread that reads only when told to.
struct FewBells {
  FewBells() {
    bells.connect(0, pairs[0]);
    bells.connect(1, pairs[1]);
    bells.start({{&registers[0], 0x100}, {&registers[1], 0x101}});
  }
  void leave(std::size_t ring, std::uint64_t end) {
    RdmaQueuePair& pair = pairs[ring];
    const std::uint64_t ticket = (*pair.bells_left)++;
    pair.doorbell[ticket & ((1u << pair.bell_bits) - 1)] =
        device::rdma::bell_word(ticket, pair.bell_bits, pair.bell_ring, end);
  }

  rdma::Bells bells{make_host_executor(), 2, 64};
  RdmaQueuePair pairs[2];
  std::uint64_t registers[2] = {};
};

TEST(RdmaBells, AreRungInOrderAndOnceEach) {
  FewBells few;
  EXPECT_FALSE(few.bells.step());
  few.leave(1, 0x1fffe);
  few.leave(0, 7);
  few.leave(1, 0x20003);
  EXPECT_TRUE(few.bells.step());
  EXPECT_EQ(few.registers[1], device::rdma::doorbell_word(0xfffe, 0x101));
  EXPECT_EQ(*few.bells.record(1), device::rdma::record_word(0xfffe)) << "not ahead of the doorbell";
  EXPECT_EQ(few.registers[0], 0u);
  EXPECT_TRUE(few.bells.step());
  EXPECT_EQ(few.registers[0], device::rdma::doorbell_word(7, 0x100));
  EXPECT_TRUE(few.bells.step());
  EXPECT_EQ(few.registers[1], device::rdma::doorbell_word(3, 0x101));
  few.registers[1] = 0;
  EXPECT_FALSE(few.bells.step());
  EXPECT_EQ(few.registers[1], 0u) << "a stale bell is not rung again";
  EXPECT_FALSE(few.bells.lost());
}

TEST(RdmaBells, OneThatWasOverwrittenIsNoticed) {
  FewBells few;
  for (std::uint64_t end = 1; end <= 129; ++end) few.leave(0, end);
  EXPECT_FALSE(few.bells.step());
  EXPECT_TRUE(few.bells.lost());
}

TEST(RdmaBells, OneThatNamesNoRingIsNoticed) {
  FewBells few;
  few.pairs[0].bell_ring = 2;
  few.leave(0, 1);
  EXPECT_FALSE(few.bells.step());
  EXPECT_TRUE(few.bells.lost());
}

}  // namespace
}  // namespace deep_ep::test
