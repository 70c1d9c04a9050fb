// Streams and events of the host executor.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels/primitives/memory.hpp"
#include "tests/executor/host_kernel.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

using namespace deep_ep::device;

/// A kernel that ends when the host sets the flag.
void launch_until(StreamHandle stream, std::uint64_t& flag) {
  launch(stream, {1, 32, 0}, [&flag](std::byte*) {
    for (int spins = 0; load_acquire<Scope::system>(&flag) == 0; ++spins) pause(spins);
  });
}
void set(std::uint64_t& flag) { std::atomic_ref(flag).store(1, std::memory_order_release); }

TEST(HostStream, WorkIsDoneInOrderAndAsynchronously) {
  Machine machine;
  Executor& executor = machine.executor();
  std::uint64_t go = 0;
  std::vector<int> source(1000, 5), destination(1000, 1);
  launch_until(machine.stream(), go);
  const std::size_t bytes = source.size() * sizeof(int);
  executor.fill(destination.data(), 0, bytes, machine.stream());
  const EventHandle filled = executor.record_event(machine.stream());
  executor.copy(destination.data(), source.data(), bytes, machine.stream());
  EXPECT_FALSE(executor.event_done(filled));
  EXPECT_EQ(destination[0], 1);
  set(go);
  executor.synchronize(machine.stream());
  EXPECT_TRUE(executor.event_done(filled));
  EXPECT_EQ(destination, source);
}

TEST(HostStream, EventsOrderStreams) {
  Machine machine;
  Executor& executor = machine.executor();
  const StreamHandle other = executor.create_stream();
  for (int round = 0; round < 20; ++round) {
    std::uint64_t go = 0;
    int value = 0, seen = -1;
    launch_until(machine.stream(), go);
    launch(machine.stream(), {1, 32, 0}, [&](std::byte*) {
      if (thread_index() == 0) value = 17;
    });
    executor.wait_event(other, executor.record_event(machine.stream()));
    launch(other, {1, 32, 0}, [&](std::byte*) {
      if (thread_index() == 0) seen = value;
    });
    set(go);
    executor.synchronize(other);
    EXPECT_EQ(seen, 17);
    executor.wait_event(other, executor.record_event(machine.stream()));  // has completed already
    executor.synchronize(machine.stream());
  }
  executor.destroy_stream(other);
}

TEST(HostStream, TheHostSeesTheWorkBehindAnEvent) {
  Machine machine;
  int value = 0;
  launch(machine.stream(), {1, 32, 0}, [&](std::byte*) {
    if (thread_index() == 31) value = 3;
  });
  const EventHandle done = machine.executor().record_event(machine.stream());
  machine.executor().synchronize_event(done);
  EXPECT_EQ(value, 3);
}

TEST(HostStream, TimedEventsMeasure) {
  Machine machine;
  Executor& executor = machine.executor();
  const EventHandle begin = executor.record_timed_event(machine.stream());
  launch(machine.stream(), {1, 32, 0}, [](std::byte*) {
    const std::uint64_t start = now_ns();
    for (int spins = 0; now_ns() < start + 5000000; ++spins) pause(spins);
  });
  const EventHandle end = executor.record_timed_event(machine.stream());
  executor.synchronize_event(end);
  EXPECT_GE(executor.elapsed_seconds(begin, end), 0.005);
}

TEST(HostStream, AFailureIsThrownOnceAndSkipsWhatFollows) {
  Machine machine;
  Executor& executor = machine.executor();
  bool ran = false;
  launch(machine.stream(), {1, 32, 0}, [](std::byte*) { throw std::runtime_error("first"); });
  launch(machine.stream(), {1, 32, 0}, [&](std::byte*) { ran = true; });
  executor.free_async(executor.allocate_async(64, machine.stream()), machine.stream());
  executor.synchronize_event(executor.record_event(machine.stream()));
  EXPECT_THROW(executor.synchronize(machine.stream()), Error);
  EXPECT_FALSE(ran);
  EXPECT_NO_THROW(executor.synchronize(machine.stream()));
  launch(machine.stream(), {1, 32, 0}, [&](std::byte*) {
    if (thread_index() == 0) ran = true;
  });
  executor.synchronize(machine.stream());
  EXPECT_TRUE(ran);
}

TEST(HostStream, TheDefaultStreamIsTheCurrentExecutors) {
  Machine machine;
  machine.executor().make_current();
  std::uint64_t runs = 0;
  launch(nullptr, {1, 32, 0}, [&](std::byte*) { add_relaxed<Scope::gpu>(&runs, 1); });
  machine.executor().synchronize(nullptr);
  EXPECT_EQ(runs, 32u);
  std::thread([&] { EXPECT_THROW(launch(nullptr, {1, 32, 0}, [](std::byte*) {}), Error); }).join();
}

TEST(HostStream, MemoryIsAligned) {
  Machine machine;
  Executor& executor = machine.executor();
  for (const std::size_t bytes : {0, 1, 300, 100000}) {
    void* a = executor.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % 256, 0u);
    executor.free(a);
    auto* p = static_cast<unsigned char*>(executor.allocate_pinned(bytes));
    for (std::size_t i = 0; i < bytes; ++i) ASSERT_EQ(p[i], 0);
    executor.free_pinned(p);
  }
  executor.free(nullptr);
#if !DEEP_EP_TSAN && !DEEP_EP_ASAN  // their allocators end the process
  EXPECT_THROW(executor.allocate(std::size_t{1} << 60), OutOfMemory);
#endif
}

TEST(HostRanks, EightRanksWaitForEachOtherThroughManyRounds) {
  constexpr int kRanks = 8, kBlocks = 4, kThreads = under_thread_sanitizer() ? 32 : 96;  // of which eight do something
  constexpr std::uint64_t kRounds = 20;
  struct alignas(128) Flag {
    std::uint64_t value = 0;
    std::uint64_t payload = 0;
  };
  for (const std::uint64_t seed : {0, 11, 12}) {
    std::vector<std::vector<Flag>> flags(kRanks, std::vector<Flag>(kRanks * kBlocks * 2));
    std::vector<std::thread> ranks;
    std::uint64_t wrong = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        Machine machine(seed == 0 ? 0 : seed + static_cast<std::uint64_t>(rank));
        machine.run({kBlocks, kThreads, 0}, [&flags, &wrong, rank, blocks = kBlocks](std::byte*) {
          // Thread p of block b tells rank p's block b about the round, then waits for its word. Slots are double:
          // a peer may be one round ahead.
          if (thread_index() >= kRanks) return;
          const auto slot = [=](int from, std::uint64_t round) {
            return static_cast<std::size_t>((from * blocks + block_index()) * 2) + round % 2;
          };
          for (std::uint64_t round = 1; round <= kRounds; ++round) {
            const auto peer = static_cast<std::size_t>(thread_index());
            Flag& out = flags[peer][slot(rank, round)];
            out.payload = round * 1000 + static_cast<std::uint64_t>(rank);
            store_release<Scope::system>(&out.value, round);
            Flag& in = flags[static_cast<std::size_t>(rank)][slot(thread_index(), round)];
            for (int spins = 0; load_acquire<Scope::system>(&in.value) < round; ++spins) pause(spins);
            if (in.payload != round * 1000 + peer) add_relaxed<Scope::system>(&wrong, 1);
          }
        });
      });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(wrong, 0u) << "seed " << seed;
  }
}

}  // namespace
}  // namespace deep_ep::test
