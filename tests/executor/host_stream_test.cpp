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

}  // namespace
}  // namespace deep_ep::test
