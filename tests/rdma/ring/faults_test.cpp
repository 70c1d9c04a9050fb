// Every way in which a queue pair can fail, and what is said about it.
#include <gtest/gtest.h>
#include <sched.h>

#include <functional>
#include <memory>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "csrc/rdma/ring/polling.hpp"
#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rdma/ring/queue_world.hpp"

namespace deep_ep::test {
namespace {

using rdma::Syndrome;

constexpr std::uint64_t kSignal = 4096;

/// What the device's code put on record.
RdmaFailure recorded(const QueueWorld& world) {
  EXPECT_EQ(world.fault().kind, FaultKind::rdma_failed);
  EXPECT_EQ(world.fault().peer, 7);
  return RdmaFailure::unpack(static_cast<std::uint32_t>(world.fault().field));
}

struct FaultCase {
  const char* name;
  Syndrome syndrome;
  std::uint8_t vendor;
  std::uint32_t opcode;  ///< of entry 3
  const char* text;
};

const FaultCase kCases[] = {
    {"AnAddition", Syndrome::remote_invalid_request, 0, device::rdma::kOpcodeFetchAdd,
     "syndrome 0x12, remote invalid request"},
    {"PeerIsGone", Syndrome::transport_retries_exceeded, 0x88, device::rdma::kOpcodeWrite,
     "syndrome 0x15, transport retries exceeded: the peer does not answer (process gone, link down, wrong GID or "
     "route) "
     "(vendor code 0x88)"},
};

class RdmaFaults : public testing::TestWithParam<FaultCase> {
 protected:
  /// Three good entries, the bad one, two after it.
  static void post_all(QueueWorld& world) {
    world.run([&](auto& peers) {
      QueueWorld::Peer& peer = *peers[0];
      *world.local(0) = std::byte{42};
      EXPECT_TRUE(peer.put(100, 0, 1));
      EXPECT_TRUE(peer.put(200, 0, 1));
      EXPECT_TRUE(peer.signal_add(kSignal, 5));
      world.wire().fail_at(QueueWorld::number(0), 3, GetParam().syndrome, GetParam().vendor);
      EXPECT_TRUE(GetParam().opcode == device::rdma::kOpcodeWrite ? peer.put(0, 0, 8) : peer.signal_add(kSignal, 1));
      EXPECT_TRUE(peer.put(300, 0, 1));
      EXPECT_TRUE(peer.signal_add(kSignal, 1000));
      EXPECT_FALSE(peer.quiet());
      EXPECT_FALSE(peer.put(300, 0, 1));
      EXPECT_FALSE(peer.signal_add(kSignal, 1000));
    });
    // In the next kernel, too.
    world.run([&](auto& peers) { EXPECT_FALSE(peers[0]->put(300, 0, 1)); });
    world.settle();
    std::uint64_t sum;
    std::memcpy(&sum, world.remote(kSignal), sizeof sum);
    EXPECT_EQ(sum, 5u);
    EXPECT_EQ(*world.remote(100), std::byte{42});
    EXPECT_EQ(*world.remote(200), std::byte{42});
    EXPECT_EQ(*world.remote(300), std::byte{0});
  }
};
INSTANTIATE_TEST_SUITE_P(, RdmaFaults, testing::ValuesIn(kCases), [](const auto& info) { return info.param.name; });

TEST_P(RdmaFaults, OfTheDevice) {
  QueueWorld world({.seed = 3, .nic = {.flush_overwrites = false}});
  post_all(world);
  const RdmaFailure failure = recorded(world);
  EXPECT_EQ(failure.syndrome, static_cast<std::uint32_t>(GetParam().syndrome));
  EXPECT_EQ(failure.opcode, GetParam().opcode);
  EXPECT_EQ(world.fault().expected, 3u);
  EXPECT_EQ(world.nic().violation(), "");
  const std::string text = rdma::describe_fault(2, world.fault());
  EXPECT_TRUE(contains(text, "rank 2: RDMA "));
  EXPECT_TRUE(contains(text, "to rank 7 failed (entry 3)"));
  EXPECT_TRUE(contains(text, GetParam().text));
}

TEST_P(RdmaFaults, OfTheCpuHandler) {
  QueueWorld world({.behind = Behind::cpu_handler, .seed = 4});
  post_all(world);
  const RdmaFailure failure = recorded(world);
  EXPECT_EQ(failure.syndrome, static_cast<std::uint32_t>(GetParam().syndrome));
  EXPECT_EQ(failure.opcode, GetParam().opcode);
  EXPECT_EQ(world.fault().expected, 3u);
  const std::string text = world.handler().failure();
  EXPECT_TRUE(says(text, {GetParam().opcode == device::rdma::kOpcodeWrite ? "RDMA write" : "RDMA fetch-and-add",
                          "to rank 7 over adversarial wire failed (queue pair 0x100, entry 3)", GetParam().text}));
}

TEST(RdmaFaultsOfADevice, LateReadersSeeTheFlushBehindTheCause) {
  QueueWorld world({.seed = 5, .nic = {.flush_overwrites = true}});
  world.run([&](auto& peers) {
    world.wire().fail_at(QueueWorld::number(0), 0, Syndrome::remote_access);
    for (int i = 0; i < 11; ++i) peers[0]->put(0, 0, 8);
    peers[0]->flush();
    world.settle();
    EXPECT_FALSE(peers[0]->quiet());
  });
  EXPECT_EQ(recorded(world).syndrome, static_cast<std::uint32_t>(Syndrome::flushed));
  EXPECT_TRUE(contains(rdma::describe_fault(0, world.fault()), "an earlier operation has the cause"));
}

class RdmaWaits : public testing::TestWithParam<Behind> {};
INSTANTIATE_TEST_SUITE_P(, RdmaWaits, testing::Values(Behind::software_nic, Behind::ringer, Behind::cpu_handler),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(RdmaWaits, ForRoomHaveADeadline) {
  QueueWorld world({.behind = GetParam(), .depth = 64, .timeout_ns = 20'000'000});
  world.wire().silence(QueueWorld::number(0));
  world.run([&](auto& peers) {
    int posted = 0;
    while (posted < 1000 && peers[0]->put(0, 0, 8)) ++posted;
    EXPECT_EQ(posted, 64);
  });
  EXPECT_EQ(world.fault().kind, FaultKind::timeout);
  EXPECT_EQ(world.nic().violation(), "");
}

TEST(RdmaMissingDoorbells, GivingTheQueuePairBackRings) {
  for (const Behind behind : {Behind::software_nic, Behind::ringer, Behind::cpu_handler}) {
    QueueWorld world({.behind = behind});
    world.run([&](auto& peers) { peers[0]->signal_add(kSignal, 1); });
    world.settle();
    EXPECT_EQ(world.wire().executed(QueueWorld::number(0)), 1u);
  }
}

TEST(RdmaCompletionEntry, ThatMakesNoSenseIsAFault) {
  const std::uint32_t tails[] = {
      device::rdma::tail_word(5, device::rdma::kCompletionOk),       // an entry that was never rung
      device::rdma::tail_word(0xfff0, device::rdma::kCompletionOk),  // one from long ago
      device::rdma::tail_word(0, 14),                                // a failed receive
      device::rdma::tail_word(0, 1),
  };
  for (const std::uint32_t tail : tails) {
    QueueWorld world({.behind = Behind::cpu_handler});
    world.wire().silence(QueueWorld::number(0));
    world.run([&](auto& peers) {
      peers[0]->put(0, 0, 8);
      world.rings().completion(0)->tail = tail;
      EXPECT_FALSE(peers[0]->quiet());
    });
    EXPECT_EQ(recorded(world).syndrome, 0u);
    EXPECT_TRUE(contains(rdma::describe_fault(1, world.fault()),
                         "rank 1: the completion entry of the queue pair to rank 7 makes no sense"));
  }
}

void set(device::Vec16& segment, int word, std::uint32_t value) { segment.word[word] = device::rdma::swap32(value); }

/// An entry that this library would not write is a failure that says why. Two good ones come before it.
TEST(RdmaBadEntry, IsAFailureThatSaysWhy) {
  using Entry = device::rdma::WorkQueueEntry;
  constexpr std::uint32_t kFourSegments = 0x100 << 8 | 4;
  const struct {
    std::function<void(Entry&)> spoil;
    const char* text;
  } cases[] = {
      {[](Entry& e) { set(e.segment[0], 0, 2 << 8 | 0x2a); }, "opcode 0x2a, modifier 0, 3 segments, data of 8 bytes"},
      {[](Entry& e) { set(e.segment[0], 0, 1u << 24 | 2 << 8 | 8); }, "opcode 0x08, modifier 1, 3 segments"},
      {[](Entry& e) { set(e.segment[0], 0, 130 << 8 | 8); }, "no such entry there: number 130 of queue pair 0x100"},
      {[](Entry& e) { set(e.segment[0], 1, 0x101 << 8 | 3); }, "number 2 of queue pair 0x101"},
      {[](Entry& e) { set(e.segment[0], 1, 0x100 << 8 | 5); }, "opcode 0x08, modifier 0, 5 segments"},
      {[](Entry& e) { set(e.segment[2], 0, 0); }, "data of 0 bytes"},
      {[](Entry& e) { set(e.segment[0], 1, kFourSegments); }, "opcode 0x08, modifier 0, 4 segments"},
      {[](Entry& e) {
         device::rdma::fetch_add_entry(e, 2, QueueWorld::number(0), {kSignal, 2}, {0, 1}, 1);
         set(e.segment[3], 0, 4);
       },
       "opcode 0x12, modifier 0, 4 segments, data of 4 bytes"},
      {[](Entry& e) {
         device::rdma::fetch_add_entry(e, 2, QueueWorld::number(0), {kSignal, 2}, {0, 1}, 1);
         set(e.segment[0], 1, 0x100 << 8 | 3);
       },
       "opcode 0x12, modifier 0, 3 segments"},
  };
  for (const auto& [spoil, text] : cases) {
    SCOPED_TRACE(text);
    QueueWorld world({.behind = Behind::cpu_handler});
    world.run([&](auto& peers) {
      *world.local(0) = std::byte{1};
      peers[0]->put(8, 0, 4);
      peers[0]->signal_add(kSignal, 1);
      peers[0]->put(16, 0, 8);
      spoil(world.rings().ring(0)[2]);
      EXPECT_FALSE(peers[0]->quiet());
      EXPECT_EQ(*world.remote(8), std::byte{1}) << "told of before those before it are complete";
      EXPECT_EQ(*world.remote(kSignal), std::byte{1});
    });
    world.settle();
    EXPECT_EQ(*world.remote(16), std::byte{0});
    EXPECT_EQ(recorded(world).syndrome, static_cast<std::uint32_t>(Syndrome::local_queue_pair));
    EXPECT_EQ(world.fault().expected, 2u);
    EXPECT_TRUE(contains(world.handler().failure(), text));
  }
}

TEST(RdmaBadEntry, ALateStoreDoesNotMendIt) {
  QueueWorld world({.behind = Behind::cpu_handler});
  world.wire().silence(QueueWorld::number(0));
  world.run([&](auto& peers) {
    EXPECT_TRUE(peers[0]->put(16, 0, 8));
    device::Vec16& control = world.rings().ring(0)[0].segment[0];
    const device::Vec16 written = control;
    set(control, 0, 0x2a);
    peers[0]->flush();
    world.settle();
    control = written;
    world.wire().silence(QueueWorld::number(0), false);
    EXPECT_FALSE(peers[0]->quiet());
  });
  EXPECT_EQ(*world.remote(16), std::byte{0});
  EXPECT_TRUE(contains(world.handler().failure(), "no such entry there: number 0 of queue pair 0x100, opcode 0x2a"));
}

TEST(RdmaCpuHandler, AProducerIndexTooFarAheadIsAFailure) {
  QueueWorld world({.behind = Behind::cpu_handler});
  *world.rings().producer_index(0) = 129;
  world.settle(5);
  EXPECT_TRUE(contains(world.handler().failure(), "the producer index is 129, at most 128 is possible"));
}

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  EXPECT_EQ(::sched_getaffinity(0, sizeof set, &set), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<int> cpus_of_handler(const std::vector<int>& near) {
  std::vector<int> cpus;
  std::binary_semaphore seen(0);
  const std::jthread thread = rdma::polling_thread(near, /*for_device=*/true, [&] {
    if (cpus.empty()) {
      cpus = allowed_cpus();
      seen.release();
    }
    return false;
  });
  seen.acquire();
  return cpus;
}

TEST(RdmaCpuHandler, RunsNearItsNicWhereThisProcessMayRunThere) {
  const std::vector<int> all = allowed_cpus();
  EXPECT_EQ(cpus_of_handler({}), all);
  EXPECT_EQ(cpus_of_handler({all.back(), CPU_SETSIZE - 1, CPU_SETSIZE}), std::vector<int>{all.back()});
  EXPECT_EQ(cpus_of_handler({CPU_SETSIZE - 1}), all) << "none of these is this process's";
}

TEST(RingMemoryTest, IdleWhenAllIsDoneOrHasFailed) {
  QueueWorld world({.behind = Behind::cpu_handler, .queue_pairs = 2});
  const auto post = [&](std::size_t pair) {
    world.run([&](auto& peers) { EXPECT_TRUE(peers[pair]->put(100, 0, 1)); });
  };
  EXPECT_TRUE(world.idle());
  post(0);
  world.wire().silence(QueueWorld::number(1));
  post(1);
  EXPECT_FALSE(world.idle());
  world.settle();
  EXPECT_FALSE(world.idle()) << "the second queue pair is stuck";
  world.wire().silence(QueueWorld::number(1), false);
  world.settle();
  EXPECT_TRUE(world.idle());
  world.wire().fail_at(QueueWorld::number(0), 1, Syndrome::transport_retries_exceeded);
  post(0);
  EXPECT_FALSE(world.idle());
  world.settle();
  EXPECT_TRUE(world.idle());
  EXPECT_NE(world.handler().failure(), "");
}

TEST(RdmaHandler, AFullQueueHoldsUpNoOther) {
  QueueWorld world({.behind = Behind::cpu_handler, .queue_pairs = 2});
  world.wire().most = 1;
  world.wire().silence(QueueWorld::number(0));
  world.run([&](auto& peers) {
    for (const std::size_t pair : {0, 0, 1}) {
      EXPECT_TRUE(peers[pair]->put(0, 0, 8));
      peers[pair]->flush();
    }
    EXPECT_TRUE(peers[1]->quiet());
  });
  EXPECT_EQ(world.wire().executed(QueueWorld::number(0)), 0u);
  EXPECT_FALSE(world.idle());
  world.wire().silence(QueueWorld::number(0), false);
  world.settle();
  EXPECT_TRUE(world.idle());
}

TEST(RdmaHandler, NoMoreIsUnderWayThanTheWiresQueueHolds) {
  QueueWorld world({.behind = Behind::cpu_handler});
  world.wire().most = 4;
  world.run([&](auto& peers) {
    for (int i = 0; i < 40; ++i) {
      EXPECT_TRUE(peers[0]->signal_add(kSignal, 1));
      peers[0]->flush();
    }
    EXPECT_TRUE(peers[0]->quiet());
  });
}

TEST(RdmaHandler, ACompletionOfNothingIsAFailure) {
  QueueWorld world({.behind = Behind::cpu_handler});
  world.wire().made_up = {{.ring = 0, .index = 5}};
  EXPECT_TRUE(world.handler().step());
  EXPECT_TRUE(contains(world.handler().failure(),
                       "the wire threw: it completed entry 5 of queue pair 0x100, which was not posted"));
}

TEST(RdmaHandler, ABrokenWireFailsEveryRingAndGivesNoMoreWork) {
  QueueWorld world({.behind = Behind::cpu_handler, .queue_pairs = 2});
  world.wire().broken = true;
  EXPECT_TRUE(world.handler().step());
  for (const std::size_t ring : {0, 1}) {
    EXPECT_EQ(device::rdma::tail_opcode(world.rings().completion(ring)->tail), device::rdma::kCompletionError);
  }
  EXPECT_FALSE(world.handler().step());
  EXPECT_TRUE(world.idle());
  EXPECT_TRUE(contains(world.handler().failure(),
                       "over adversarial wire failed (queue pair 0x100, entry 0): the wire threw: the device is gone"));
}

}  // namespace
}  // namespace deep_ep::test
