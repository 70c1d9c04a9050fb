// Bulk copies of the host machine come as late as a program allows; shared memory is poisoned.
#include <gtest/gtest.h>

#include <set>
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

constexpr std::uint32_t kPoison = 0xC5C5C5C5u;
constexpr std::uint32_t kOld = 7, kNew = 42;

struct alignas(16) Row {
  std::uint32_t word[4];
};
constexpr Row row_of(std::uint32_t v) { return {{v, v, v, v}}; }

/// One warp whose lane 0 does `body` with a barrier that is ready for use, a stage, and a row of global memory.
std::string run_lane(std::uint64_t seed, const std::function<void(Mbarrier&, Row* stage, Row* global)>& body,
                     Row* global) {
  Machine machine(seed);
  return machine.failure_of({1, 32, 1024}, [&](std::byte* shared) {
    auto& barrier = *reinterpret_cast<Mbarrier*>(shared);
    if (thread_index() == 0) {
      mbarrier::init(barrier, 1);
      mbarrier::fence_init();
      body(barrier, reinterpret_cast<Row*>(shared + 128), global);
    }
    warp::sync();
  });
}

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
  EXPECT_EQ(seen, std::vector<std::uint32_t>(8, kPoison));
}

#if !DEEP_EP_ASAN  // there the write itself is reported
TEST(HostShared, WritesBehindTheEndAreReported) {
  Machine machine;
  const std::string text = machine.failure_of({1, 32, 64}, [](std::byte* shared) {
    if (thread_index() == 0) shared[64 + 3] = std::byte{1};
  });
  EXPECT_NE(text.find("past the end of its 64 bytes"), std::string::npos) << text;
}
#endif

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

TEST(HostBulk, SeedsMakeLoadsEarlyOrLate) {
  int early = 0;
  std::uint32_t late_word = 0;
  constexpr int kSeeds = 100;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Row global = row_of(kNew);
    EXPECT_EQ(run_lane(
                  seed,
                  [&](Mbarrier& barrier, Row* stage, Row* source) {
                    mbarrier::arrive_expect_bytes(barrier, sizeof(Row));
                    bulk::load(stage, source, sizeof(Row), barrier);
                    early += stage->word[0] == kNew;
                    mbarrier::wait(barrier, 0);
                    late_word = stage->word[3];
                  },
                  &global),
              "");
    EXPECT_EQ(late_word, kNew);
  }
  EXPECT_GT(early, 0);
  EXPECT_LT(early, kSeeds);
}

TEST(HostBulk, SeedsMakeStoresEarlyOrLate) {
  std::set<int> moments;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Row global = row_of(kOld);
    int late = 0;
    EXPECT_EQ(run_lane(
                  seed,
                  [&](Mbarrier& barrier, Row* stage, Row* destination) {
                    const auto look = [&] { late += destination->word[0] == kOld; };
                    const auto fill = [&](const Row& with, std::uint32_t parity) {
                      mbarrier::arrive_expect_bytes(barrier, sizeof(Row));
                      bulk::load(stage, &with, sizeof(Row), barrier);
                      mbarrier::wait(barrier, parity);
                    };
                    fill(row_of(kNew), 0);
                    bulk::store(destination, stage, sizeof(Row));
                    look();
                    bulk::commit();
                    bulk::wait_read<0>();
                    look();
                    fill(row_of(99), 1);  // the stage is free
                    bulk::wait<0>();
                    look();
                    bulk::fence_global();
                    look();
                  },
                  &global),
              "");
    EXPECT_EQ(global.word[0], kNew);
    moments.insert(late);
  }
  EXPECT_EQ(moments, (std::set<int>{0, 1, 2, 3}));
}

/// Thread 0 acquires a word, thread 32 copies; `fence` says which threads fence, and when.
enum class Fences { none, before_the_acquire, by_the_acquirer, by_the_copier, before_they_meet };
std::string copy_after_acquire(std::uint64_t seed, Fences fences, bool loads) {
  Machine machine(seed);
  Row global = row_of(kOld);
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

TEST(HostBulk, MisuseIsReported) {
  Row rows[2] = {};
  const auto expect = [&](const char* part, const std::function<void(Mbarrier&, Row*, Row*)>& body) {
    for (std::uint64_t seed : {0, 1, 2, 3, 4, 5}) {
      const std::string text = run_lane(seed, body, rows);
      EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
    }
  };
  expect("exits while 1 of its bulk stores", [](Mbarrier&, Row* stage, Row* global) {
    bulk::store(global, stage, sizeof(Row));
    bulk::commit();
  });
  expect("exits while 1 of its bulk stores", [](Mbarrier&, Row* stage, Row* global) {
    bulk::store(global, stage, sizeof(Row));
    bulk::wait<0>();  // nothing was committed
  });
  expect("the block ends", [](Mbarrier& barrier, Row* stage, Row* global) {
    mbarrier::arrive_expect_bytes(barrier, sizeof(Row));
    bulk::load(stage, global, sizeof(Row), barrier);
  });
  expect("deadlock", [](Mbarrier& barrier, Row* stage, Row* global) {
    mbarrier::arrive_expect_bytes(barrier, 3 * sizeof(Row));
    bulk::load(stage, global, 2 * sizeof(Row), barrier);
    mbarrier::wait(barrier, 0);
  });
  expect("bulk::load of 8 bytes",
         [](Mbarrier& barrier, Row* stage, Row* global) { bulk::load(stage, global, 8, barrier); });
  expect("not aligned to 16", [](Mbarrier&, Row* stage, Row* global) {
    bulk::store(reinterpret_cast<std::byte*>(global) + 8, stage, sizeof(Row));
  });
  expect("not inside the block's shared memory",
         [](Mbarrier&, Row* stage, Row* global) { bulk::store(global, stage + 100, sizeof(Row)); });
  expect("fence_init", [](Mbarrier& barrier, Row* stage, Row* global) {
    Mbarrier& second = (&barrier)[1];
    mbarrier::init(second, 1);
    mbarrier::arrive_expect_bytes(second, sizeof(Row));
    bulk::load(stage, global, sizeof(Row), second);
  });
}

}  // namespace
}  // namespace deep_ep::test
