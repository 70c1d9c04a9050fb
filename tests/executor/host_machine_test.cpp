// What the host machine does to kernels so that mistakes show, and what it says of those that cannot go on. Mistakes in
// kernels (tests/mutants) that it reports in other words are caught by tests of those kernels.
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "kernels/primitives/block.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/executor/host_kernel.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

using namespace deep_ep::device;

TEST(HostSync, ABarrierThatSomeNeverReachIsADeadlock) {
  Machine machine;
  const std::string text = machine.failure_of({2, 64, 0}, [](std::byte*) {
    if (block_index() == 1 && warp_index() == 0) return;
    block::sync();
  });
  for (const char* part : {"kernel probe", "block 1", "deadlock", "threads 0-31 have exited",
                           "threads 32-63 wait for their block (32 of 64 threads came)"}) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
  }
}

TEST(HostSync, ExceptionsNameKernelBlockAndThread) {
  Machine machine;
  try {
    machine.run(
        {3, 64, 0},
        [](std::byte*) {
          if (block_index() == 2 && thread_index() == 40) throw std::runtime_error("it broke");
          block::sync();
        },
        "fragile");
    FAIL() << "no exception";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "kernel fragile, block 2, thread 40: it broke");
  }
  // The machine is usable afterwards.
  EXPECT_NO_THROW(machine.run({3, 64, 0}, [](std::byte*) { block::sync(); }));
}

struct alignas(16) Row {
  std::uint32_t word[4] = {};
};

TEST(HostShared, IsPoisonedInEveryBlock) {
  Machine machine;
  std::vector<std::uint32_t> seen(8);
  for (int launch = 0; launch < 2; ++launch) {
    machine.run({4, 32, 4096}, [&](std::byte* shared) {
      auto* words = reinterpret_cast<std::uint32_t*>(shared);
      if (thread_index() == 0) seen[static_cast<std::size_t>(launch * 4 + block_index())] = words[1000];
      if (thread_index() == 0) words[1000] = 1;
    });
  }
  EXPECT_EQ(seen, std::vector<std::uint32_t>(8, 0xC5C5C5C5u));
}

TEST(HostShared, ScopesWiderThanTheBlockAreReported) {
  Machine machine;
  std::uint32_t global = 0;
  const auto failure_of = [&](auto access) {
    return machine.failure_of({1, 32, 64}, [&](std::byte* shared) {
      if (thread_index() == 0) access(reinterpret_cast<std::uint32_t*>(shared + 16));
    });
  };
  EXPECT_EQ(failure_of([&](std::uint32_t* word) {
              store_relaxed<Scope::block>(word, 0u);
              fetch_add_acq_rel<Scope::block>(word, 1u);
              fetch_add_acq_rel<Scope::system>(&global, load_relaxed<Scope::block>(word));
            }),
            "");
  const auto text = failure_of([](std::uint32_t* word) { store_relaxed<Scope::gpu>(word, 0u); });
  EXPECT_NE(text.find("an access at gpu or system scope to shared+16"), std::string::npos) << text;
}

/// Thread 0 acquires a word, thread 32 copies; `fence` says which threads fence, and when.
enum class Fences { none, before_the_acquire, by_the_acquirer, by_the_copier, before_they_meet };
std::string copy_after_acquire(std::uint64_t seed, Fences fences, bool loads) {
  Machine machine(seed);
  Row global;
  const std::uint64_t word = 1;
  return machine.failure_of({1, 64, 1024}, [&](std::byte* shared) {
    auto& barrier = *reinterpret_cast<Mbarrier*>(shared);
    if (thread_index() == 0) {
      mbarrier::init(barrier, 1);
      mbarrier::fence_init();
      if (fences == Fences::before_the_acquire) bulk::fence_global();
      load_acquire<Scope::system>(&word);
      if (fences == Fences::by_the_acquirer) bulk::fence_global();
    }
    if (thread_index() == 32 && fences == Fences::before_they_meet) bulk::fence_global();
    warp::sync();
    block::sync();
    if (thread_index() != 32) return;
    if (fences == Fences::by_the_copier) bulk::fence_global();
    if (loads) {
      mbarrier::arrive_expect_bytes(barrier, sizeof(Row));
      bulk::load(shared + 128, &global, sizeof(Row), barrier);
      mbarrier::wait(barrier, 0);
    } else {
      bulk::store(&global, shared + 128, sizeof(Row));
      bulk::commit();
      bulk::wait<0>();
    }
  });
}

TEST(HostBulk, CopiesBehindAnAcquireNeedAFenceBetween) {
  for (std::uint64_t seed = 0; seed < (under_thread_sanitizer() ? 5u : 20u); ++seed) {
    for (const bool loads : {false, true}) {
      for (const auto fences : {Fences::none, Fences::before_the_acquire, Fences::before_they_meet}) {
        EXPECT_NE(copy_after_acquire(seed, fences, loads).find("without bulk::fence_global"), std::string::npos);
      }
      EXPECT_EQ(copy_after_acquire(seed, Fences::by_the_acquirer, loads), "");
      EXPECT_EQ(copy_after_acquire(seed, Fences::by_the_copier, loads), "");
    }
  }
}

}  // namespace
}  // namespace deep_ep::test
