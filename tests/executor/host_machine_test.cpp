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
#include "tests/support/setting.hpp"

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

TEST(HostShared, AWritePastTheEndIsReported) {
  if (DEEP_EP_ASAN) GTEST_SKIP() << "AddressSanitizer ends the process there";
  const auto machine = make_host_executor();
  const std::string text = failure_of(*machine, {1, 32, 64}, [](std::byte* shared) {
    if (thread_index() == 0) shared[64] = std::byte{1};
  });
  EXPECT_NE(text.find("a write past the end of its 64 bytes of shared memory"), std::string::npos) << text;
}

/// In the fixed schedule every copy is as late as the program allows, so a program that reads, reuses a stage or
/// signals too early always gets the wrong bytes. The engine never sees what threads wrote to a stage.
TEST(HostBulk, CopiesAreAsLateAsTheProgramAllows) {
  const Setting fixed_schedule("DEEP_EP_HOST_SEED", "0");
  const auto machine = make_host_executor();
  alignas(16) std::byte source[2][16] = {{std::byte{1}}, {std::byte{2}}}, row[2][16] = {};
  std::vector<std::byte> seen;
  const std::string text = failure_of(*machine, {1, 32, 128}, [&](std::byte* shared) {
    if (thread_index() != 0) return;
    auto& loaded = *reinterpret_cast<Mbarrier*>(shared + 64);
    mbarrier::init(loaded);
    mbarrier::fence_init();
    for (const std::uint32_t phase : {0u, 1u}) {
      mbarrier::arrive_expect_bytes(loaded, 16);
      bulk::load(shared, source[phase], 16, loaded);
      seen.push_back(shared[0]);  // not loaded yet
      mbarrier::wait(loaded, phase);
      seen.push_back(shared[0]);
      shared[0] = std::byte{9};
      if (phase == 0) bulk::store(row[0], shared, 16);  // without wait_read: it sends the second phase's bytes
    }
    bulk::store(row[1], shared, 16);
    bulk::commit();
    bulk::wait(0);
    seen.push_back(row[0][0]);  // complete, but not in memory before the fence
    bulk::fence_global();
    seen.push_back(row[0][0]);
    seen.push_back(row[1][0]);
  });
  EXPECT_EQ(text, "");
  std::vector<std::byte> expected;
  for (const int byte : {0xC5, 1, 9, 2, 0, 2, 2}) expected.push_back(static_cast<std::byte>(byte));
  EXPECT_EQ(seen, expected);
}

TEST(HostBulk, CopiesThatNoThreadWaitsForAreReported) {
  const auto machine = make_host_executor();
  alignas(16) std::byte row[16];
  const std::string stored = failure_of(*machine, {1, 32, 128}, [&](std::byte* shared) {
    if (thread_index() == 0) bulk::store(row, shared, 16);
  });
  EXPECT_NE(stored.find("thread 0: the thread exits while 1 of its bulk stores still read shared memory"),
            std::string::npos)
      << stored;
}

/// Thread 0 acquires a word, thread 32 copies; a fence that lies elsewhere does not count.
void expect_a_fence_between(void (*acquire)(std::uint64_t* word)) {
  enum Fence { none, before_the_acquire, by_the_acquirer, by_the_copier, before_they_meet };
  for (const Fence fence : {none, before_the_acquire, by_the_acquirer, by_the_copier, before_they_meet}) {
    const auto machine = make_host_executor({.seed = 1});
    alignas(128) std::byte row[128];
    std::uint64_t word = 1;
    const std::string text = failure_of(*machine, {1, 64, 1024}, [&](std::byte* shared) {
      const auto fence_if = [&](int thread, Fence here) {
        if (thread_index() == thread && fence == here) bulk::fence_global();
      };
      fence_if(0, before_the_acquire);
      if (thread_index() == 0) acquire(&word);
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

TEST(HostBulk, CopiesBehindAnAcquireNeedAFenceBetween) {
  expect_a_fence_between([](std::uint64_t* word) { load_acquire<Scope::system>(word); });
  expect_a_fence_between([](std::uint64_t* word) { fetch_add_acq_rel<Scope::system>(word, std::uint64_t{1}); });
  expect_a_fence_between([](std::uint64_t* word) { compare_exchange<Scope::system>(word, 1, 2); });
}

}  // namespace
}  // namespace deep_ep::test
