// Timed events of the host executor, and kernels that fail. That streams and events order what they should, every call
// needs.
#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>

#include "kernels/primitives/memory.hpp"
#include "tests/executor/host_kernel.hpp"

namespace deep_ep::test {
namespace {

using namespace deep_ep::device;

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
  executor.free_after(executor.allocate(64), machine.stream());
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

TEST(HostStream, AStreamThatWaitsForAFailedOneFailsToo) {
  Machine machine;
  Executor& executor = machine.executor();
  const StreamHandle other = executor.create_stream();
  bool ran = false;
  launch(machine.stream(), {1, 32, 0}, [](std::byte*) { throw std::runtime_error("first"); });
  executor.wait_event(other, executor.record_event(machine.stream()));
  launch(other, {1, 32, 0}, [&](std::byte*) { ran = true; });
  EXPECT_THROW(executor.synchronize(other), Error);
  EXPECT_FALSE(ran);
  EXPECT_THROW(executor.synchronize(machine.stream()), Error);
  executor.destroy_stream(other);
}

}  // namespace
}  // namespace deep_ep::test
