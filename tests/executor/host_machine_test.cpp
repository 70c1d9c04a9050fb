// The host machine makes mistakes of kernels show, and says why a kernel cannot go on. Mistakes in
// kernels (tests/mutants) that it reports in other words are caught by tests of those kernels.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "csrc/executor/own_stream.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::test {
namespace {

using namespace deep_ep::device;

using Body = std::function<void(std::byte* shared)>;

/// Every thread of the grid calls the lambda. The text of the kernel's failure; empty if there was none.
std::string failure_of(Executor& executor, const LaunchShape& shape, Body body, const char* name = "probe") {
  const auto entry = [](const void* p, std::byte* shared) { (*static_cast<const Body*>(p))(shared); };
  const OwnStream stream(executor);
  host_machine::enqueue({name, shape, std::make_shared<const Body>(std::move(body)), entry}, stream.get());
  try {
    executor.synchronize(stream.get());
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(HostSync, ABarrierThatSomeNeverReachIsADeadlock) {
  const auto machine = make_host_executor();
  const std::string text = failure_of(*machine, {2, 64, 0}, [](std::byte*) {
    if (block_index() == 1 && warp_index() == 0) return;
    block::sync();
  });
  for (const char* part : {"kernel probe", "block 1", "deadlock", "threads 0-31 have exited",
                           "threads 32-63 wait for their block (32 of 64 threads came)"}) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
  }
}

TEST(HostSync, ExceptionsNameKernelBlockAndThread) {
  const auto machine = make_host_executor();
  const auto broken = [](std::byte*) {
    if (block_index() == 2 && thread_index() == 40) throw std::runtime_error("it broke");
    block::sync();
  };
  EXPECT_EQ(failure_of(*machine, {3, 64, 0}, broken, "fragile"), "kernel fragile, block 2, thread 40: it broke");
  EXPECT_EQ(failure_of(*machine, {3, 64, 0}, [](std::byte*) { block::sync(); }), "") << "the machine is usable";
}

TEST(HostShared, IsPoisonedInEveryBlock) {
  const auto machine = make_host_executor();
  std::vector<std::uint32_t> seen(8);
  for (int launch = 0; launch < 2; ++launch) {
    const auto look = [&](std::byte* shared) {
      auto* words = reinterpret_cast<std::uint32_t*>(shared);
      if (thread_index() == 0) seen[static_cast<std::size_t>(launch * 4 + block_index())] = words[1000];
      if (thread_index() == 0) words[1000] = 1;
    };
    EXPECT_EQ(failure_of(*machine, {4, 32, 4096}, look), "");
  }
  EXPECT_EQ(seen, std::vector<std::uint32_t>(8, 0xC5C5C5C5u));
}

TEST(HostShared, ScopesWiderThanTheBlockAreReported) {
  const auto machine = make_host_executor();
  const std::string text = failure_of(*machine, {1, 32, 64}, [](std::byte* shared) {
    if (thread_index() == 0) store_relaxed<Scope::gpu>(reinterpret_cast<std::uint32_t*>(shared + 16), 0u);
  });
  EXPECT_NE(text.find("an access at gpu or system scope to shared+16"), std::string::npos) << text;
}

/// Thread 0 acquires a word, thread 32 copies; a fence that lies elsewhere does not count.
TEST(HostBulk, CopiesBehindAnAcquireNeedAFenceBetween) {
  enum Fence { none, before_the_acquire, by_the_acquirer, by_the_copier, before_they_meet };
  for (const Fence fence : {none, before_the_acquire, by_the_acquirer, by_the_copier, before_they_meet}) {
    const auto machine = make_host_executor({.seed = 1});
    alignas(128) std::byte row[128];
    const std::uint64_t word = 1;
    const std::string text = failure_of(*machine, {1, 64, 1024}, [&](std::byte* shared) {
      const auto fence_if = [&](int thread, Fence here) {
        if (thread_index() == thread && fence == here) bulk::fence_global();
      };
      fence_if(0, before_the_acquire);
      if (thread_index() == 0) load_acquire<Scope::system>(&word);
      fence_if(0, by_the_acquirer);
      fence_if(32, before_they_meet);
      warp::sync();
      block::sync();
      fence_if(32, by_the_copier);
      if (thread_index() != 32) return;
      bulk::store(row, shared, sizeof row);
      bulk::commit();
      bulk::wait(0);
    });
    const bool right = fence == by_the_acquirer || fence == by_the_copier;
    EXPECT_EQ(text.find("without bulk::fence_global") == std::string::npos, right) << fence << ": " << text;
    EXPECT_EQ(text.empty(), right) << text;
  }
}

}  // namespace
}  // namespace deep_ep::test
