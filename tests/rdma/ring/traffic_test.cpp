// The device's send queue against devices that do everything they are allowed to do.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "tests/rdma/ring/queue_world.hpp"

namespace deep_ep::test {
namespace {

/// Random puts and signals over a QueueWorld; every byte is checked when the signal after it arrives.
class Traffic {
 public:
  Traffic(QueueWorld& world, std::uint64_t seed)
      : world_(world),
        random_(seed),
        // With fewer slots than a ring holds, their reuse has to wait; with more, the ring gets full.
        local_slots_(seed % 2 == 0 ? 96 : kLocalSlots),
        deep_(world.options().depth > 256) {
    queues_.resize(static_cast<std::size_t>(world.options().queue_pairs));
    world_.wire().on_add = [this](std::uint32_t number, std::uint64_t sum) {
      arrived(number - QueueWorld::number(0), sum);
    };
  }

  /// Posts `operations` in all, over all queue pairs; sometimes gives the queue pairs back and takes them again, as
  /// successive kernels do.
  void run(std::uint64_t operations) {
    std::uint64_t posted = 0;
    while (posted < operations) {
      const std::uint64_t end = std::min(operations, posted + 1 + below(3000));
      world_.run([&](auto& peers) {
        for (; posted < end && wrong_.empty(); ++posted) one(peers, posted + 1 == end);
      });
      if (!wrong_.empty()) return;
    }
    world_.run([&](auto& peers) {
      for (std::size_t i = 0; i < peers.size(); ++i) {
        signal(*peers[i], i);
        if (!peers[i]->quiet()) note(i, "quiet failed");
      }
    });
  }

  /// What went wrong first; empty if nothing did.
  std::string verdict() {
    if (!wrong_.empty()) return wrong_;
    if (world_.fault().claimed != 0) return "a fault is on record";
    for (std::size_t i = 0; i < queues_.size(); ++i) {
      Queue& queue = queues_[i];
      if (!queue.under_way.empty()) note(i, std::to_string(queue.under_way.size()) + " signals were lost");
      if (queue.arrived_puts != queue.puts) note(i, "puts were lost");
      const std::uint64_t posted = queue.puts + queue.signals;
      const std::uint64_t executed = world_.wire().executed(QueueWorld::number(i));
      if (executed != posted) note(i, std::to_string(executed) + " of " + std::to_string(posted) + " executed");
    }
    return wrong_;
  }

 private:
  static constexpr std::uint64_t kSlot = 64;
  static constexpr std::uint64_t kLocalSlots = 400;
  static constexpr std::uint64_t kRemoteSlots = 512;  ///< more: what is not yet signalled is not overwritten
  static constexpr std::uint64_t kSignals = 3 * kSlot * kRemoteSlots * 4;

  struct Put {
    std::uint64_t remote;
    std::uint32_t bytes;
    std::uint64_t tag;
  };
  struct Queue {
    std::uint64_t puts = 0;
    std::uint64_t signals = 0;
    std::uint64_t arrived_puts = 0;
    std::uint64_t sum = 0;
    std::vector<Put> since_signal;
    std::deque<std::vector<Put>> under_way;  ///< what each signal that has not arrived stands for
    std::vector<std::uint64_t> tickets = std::vector<std::uint64_t>(kLocalSlots, 0);
    std::uint64_t local_puts = 0;
  };

  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  static std::byte pattern(std::uint64_t tag, std::uint32_t i) {
    return static_cast<std::byte>((tag * 0x9e3779b97f4a7c15u) >> (8 * (i % 8)) ^ i);
  }
  void note(std::size_t queue, const std::string& what) {
    if (wrong_.empty()) wrong_ = "queue pair " + std::to_string(queue) + ": " + what;
  }

  template <class Peers>
  void one(Peers& peers, bool last) {
    const std::size_t i = below(peers.size());
    auto& peer = *peers[i];
    switch (below(16)) {
      case 0:
        signal(peer, i);
        break;
      default:
        put(peer, i);
    }
    if (below(40) == 0) peer.flush();
    if (below(deep_ ? 100'000 : 400) == 0 && !peer.quiet()) note(i, "quiet failed");
    if (last) world_.settle(static_cast<int>(below(50)));
  }

  Put next(std::size_t i, std::uint32_t bytes) {
    Queue& queue = queues_[i];
    // The bytes of a slot move about, so that neither end is aligned.
    const std::uint64_t offset = below(kSlot - bytes + 1);
    const std::uint64_t remote = (i * kRemoteSlots + queue.puts % kRemoteSlots) * kSlot + offset;
    return {remote, bytes, static_cast<std::uint64_t>(i) << 40 | ++queue.puts};
  }

  template <class Peer>
  void put(Peer& peer, std::size_t i) {
    Queue& queue = queues_[i];
    // Many entries of a deep ring would share a slot of the receiver: only their number is checked.
    const Put p = next(i, deep_ || below(20) == 0 ? 0 : static_cast<std::uint32_t>(1 + below(kSlot)));
    const std::uint64_t slot = queue.local_puts++ % local_slots_;
    if (p.bytes != 0 && !peer.wait_for(queue.tickets[slot])) return note(i, "wait_for failed");
    const std::uint64_t local = (i * kLocalSlots + slot) * kSlot;
    for (std::uint32_t b = 0; b < p.bytes; ++b) *(world_.local(local) + b) = pattern(p.tag, b);
    if (!peer.put(p.remote, local, p.bytes)) return note(i, "put failed");
    queue.tickets[slot] = peer.posted();
    queue.since_signal.push_back(p);
  }

  template <class Peer>
  void signal(Peer& peer, std::size_t i) {
    Queue& queue = queues_[i];
    queue.under_way.push_back(std::move(queue.since_signal));
    queue.since_signal.clear();
    ++queue.signals;
    // Never 0: sums must grow.
    if (!peer.signal_add(kSignals + 8 * i, 1 + queue.under_way.back().size())) note(i, "signal_add failed");
  }

  /// The receiver: has acquired a sum, and reads what it stands for.
  void arrived(std::size_t i, std::uint64_t sum) {
    Queue& queue = queues_[i];
    if (queue.under_way.empty()) return note(i, "a signal that nobody sent");
    queue.sum += 1 + queue.under_way.front().size();
    if (sum != queue.sum) note(i, "sum " + std::to_string(sum) + ", not " + std::to_string(queue.sum));
    for (const Put& p : queue.under_way.front()) {
      ++queue.arrived_puts;
      for (std::uint32_t b = 0; b < p.bytes; ++b) {
        if (*(world_.remote(p.remote) + b) != pattern(p.tag, b)) {
          note(i, "byte " + std::to_string(b) + " of put " + std::to_string(p.tag & 0xffffffffff) + " is wrong");
        }
      }
    }
    queue.under_way.pop_front();
  }

  QueueWorld& world_;
  std::mt19937_64 random_;
  std::uint64_t local_slots_;
  bool deep_;
  std::vector<Queue> queues_;
  std::string wrong_;
};

constexpr bool kSanitized = DEEP_EP_TSAN || DEEP_EP_ASAN;

std::string outcome(const QueueWorldOptions& options, std::uint64_t operations) {
  QueueWorld world(options);
  Traffic traffic(world, options.seed + 1000);
  traffic.run(operations);
  if (!world.nic().violation().empty()) return world.nic().violation();
  return traffic.verdict();
}

class RdmaTrafficOn : public testing::TestWithParam<Behind> {};
INSTANTIATE_TEST_SUITE_P(, RdmaTrafficOn, testing::Values(Behind::software_nic, Behind::ringer, Behind::cpu_handler),
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
  for (const Behind behind : {Behind::software_nic, Behind::ringer}) {
    EXPECT_EQ(outcome({.behind = behind, .seed = 21, .queue_pairs = 2, .nic = {.loses_doorbells = true}}, 20000), "");
  }
}

/// The index of the device goes round, with the thread away meanwhile.
TEST(RdmaRinger, WaitsWhereverTheIndexWraps) {
  QueueWorld world({.behind = Behind::ringer, .queue_pairs = 2, .depth = 128, .batch = 1, .first_index = 0xffc0});
  for (int lap = 0; lap < 5; ++lap) {
    world.run([&](auto& peers) {
      for (int i = 0; i < 200; ++i) EXPECT_TRUE(peers[static_cast<std::size_t>(i % 2)]->put(0, 0, 8));
      for (auto& peer : peers) EXPECT_TRUE(peer->quiet());
    });
  }
  EXPECT_EQ(world.nic().violation(), "");
  for (const std::size_t ring : {0, 1}) {
    EXPECT_EQ(world.doorbell_register(ring), device::rdma::doorbell_word(0xffc0 + 500, QueueWorld::number(ring)));
  }
}

TEST(RdmaRinger, RingsOnceForTheLastOfSeveralDoorbells) {
  rdma::Ringer ringer;
  RdmaQueuePair pairs[2];
  std::uint64_t indices[2] = {}, registers[2] = {};
  std::uint32_t records[2] = {};
  for (const std::size_t ring : {0, 1}) {
    pairs[ring].number = static_cast<std::uint32_t>(0x100 + ring);
    pairs[ring].doorbell = &indices[ring];
    ringer.add(pairs[ring], &records[ring], &registers[ring]);
  }
  EXPECT_FALSE(ringer.step());
  *pairs[1].doorbell = 0x1fffe;
  *pairs[1].doorbell = 0x20003;
  EXPECT_TRUE(ringer.step());
  EXPECT_EQ(registers[1], device::rdma::doorbell_word(3, 0x101));
  EXPECT_EQ(records[1], device::rdma::record_word(3));
  EXPECT_EQ(registers[0], 0u);
  registers[1] = 0;
  *pairs[0].doorbell = 7;
  EXPECT_TRUE(ringer.step());
  EXPECT_EQ(registers[0], device::rdma::doorbell_word(7, 0x100));
  EXPECT_FALSE(ringer.step());
  EXPECT_EQ(registers[1], 0u) << "nothing new was posted there";
}

}  // namespace
}  // namespace deep_ep::test
