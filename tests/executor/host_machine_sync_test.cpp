// Barriers and warps of the host machine, used rightly and wrongly.
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "kernels/primitives/block.hpp"
#include "kernels/primitives/mbarrier.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/executor/host_kernel.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

using namespace deep_ep::device;

void expect_text(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
}

TEST(HostSync, NamedBarriersPassDataBetweenProducerAndConsumerWarps) {
  for (std::uint64_t seed = 0; seed < (under_thread_sanitizer() ? 25u : 100u); ++seed) {
    Machine machine(seed);
    std::vector<int> wrong(32);
    machine.run({1, 96, 4096}, [&](std::byte* shared) {
      constexpr int kFull = 1, kEmpty = 2;
      auto* stage = reinterpret_cast<int*>(shared);
      // Warp 0 produces, warp 1 consumes, warp 2 has nothing to do with it.
      if (warp_index() == 0) {
        for (int round = 0; round < 5; ++round) {
          if (round > 0) block::sync(kEmpty, 64);
          stage[lane_index()] = round * 100 + lane_index();
          block::arrive(kFull, 64);
        }
      } else if (warp_index() == 1) {
        for (int round = 0; round < 5; ++round) {
          block::sync(kFull, 64);
          const int source = 31 - lane_index();
          if (stage[source] != round * 100 + source) wrong[static_cast<std::size_t>(lane_index())] = 1;
          if (round < 4) block::arrive(kEmpty, 64);
        }
      }
    });
    EXPECT_EQ(wrong, std::vector<int>(32)) << "seed " << seed;
  }
}

TEST(HostSync, MbarrierPhasesAlternate) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Machine machine(seed);
    std::vector<int> wrong(64);
    machine.run({1, 64, 256}, [&](std::byte* shared) {
      auto& barrier = *reinterpret_cast<Mbarrier*>(shared);
      auto& value = *reinterpret_cast<int*>(shared + 64);
      if (thread_index() == 0) {
        mbarrier::init(barrier, 32);
        mbarrier::fence_init();
        value = 0;
      }
      block::sync();
      for (int phase = 0; phase < 4; ++phase) {
        if (warp_index() == 0) {
          if (lane_index() == 5) value = phase + 1;
          mbarrier::arrive(barrier);
        } else {
          mbarrier::wait(barrier, static_cast<std::uint32_t>(phase & 1));
          if (value != phase + 1) wrong[static_cast<std::size_t>(thread_index())] = 1;
        }
        block::sync();
      }
      if (thread_index() == 0) mbarrier::invalidate(barrier);
    });
    EXPECT_EQ(wrong, std::vector<int>(64)) << "seed " << seed;
  }
}

TEST(HostSync, ABarrierThatSomeNeverReachIsADeadlock) {
  Machine machine;
  const std::string text = machine.failure_of({2, 64, 0}, [](std::byte*) {
    if (block_index() == 1 && warp_index() == 0) return;
    block::sync();
  });
  expect_text(text, {"kernel probe", "block 1", "deadlock", "threads 0-31 have exited",
                     "threads 32-63 wait at barrier 0 (32 of 64 threads came)"});
}

TEST(HostSync, AWarpThatIsNotCompleteIsADeadlock) {
  Machine machine;
  const std::string text = machine.failure_of({1, 32, 0}, [](std::byte*) {
    if (lane_index() != 3) warp::sum(1);
  });
  expect_text(text, {"deadlock", "31 of 32 lanes came", "thread 3 have exited"});
}

TEST(HostSync, AnMbarrierWithoutArrivalsIsADeadlock) {
  Machine machine;
  const std::string text = machine.failure_of({1, 32, 64}, [](std::byte* shared) {
    auto& barrier = *reinterpret_cast<Mbarrier*>(shared);
    if (thread_index() == 0) mbarrier::init(barrier, 2);
    warp::sync();
    if (thread_index() == 0) mbarrier::arrive(barrier);
    mbarrier::wait(barrier, 0);
  });
  expect_text(text, {"deadlock", "wait for parity 0 of mbarrier at shared+0, phase 0: 1 of 2 arrivals"});
}

TEST(HostSync, ADeadlockedBlockTakesTheOthersWithIt) {
  Machine machine;
  std::uint64_t never = 0;
  const std::string text = machine.failure_of({4, 32, 0}, [&](std::byte*) {
    if (block_index() == 0 && lane_index() == 0) return;
    if (block_index() == 0) warp::sync();
    for (int spins = 0; load_acquire<Scope::gpu>(&never) == 0; ++spins) pause(spins);
  });
  expect_text(text, {"block 0", "deadlock"});
}

TEST(HostSync, LanesAtDifferentOperationsAreReported) {
  Machine machine;
  expect_text(machine.failure_of({1, 32, 0},
                                 [](std::byte*) {
                                   if (lane_index() == 9) {
                                     warp::ballot(true);
                                   } else {
                                     warp::sync();
                                   }
                                 }),
              {"block 0, thread 9", "different operations", "warp::ballot", "warp::sync"});
}

TEST(HostSync, BarrierMisuseIsReported) {
  Machine machine;
  expect_text(machine.failure_of({1, 96, 0}, [](std::byte*) { block::sync(1, warp_index() == 0 ? 64 : 96); }),
              {"barrier 1 is meant for 96 threads by this thread and for 64 by others"});
  expect_text(machine.failure_of({1, 64, 0}, [](std::byte*) { block::sync(16, 64); }), {"barrier 16", "allowed"});
  expect_text(machine.failure_of({1, 64, 0}, [](std::byte*) { block::sync(1, 40); }), {"40 threads", "allowed"});
}

TEST(HostSync, MbarrierMisuseIsReported) {
  Machine machine;
  const auto use = [&](auto body) {
    return machine.failure_of({1, 32, 256}, [body](std::byte* shared) {
      if (thread_index() == 0) body(*reinterpret_cast<Mbarrier*>(shared));
    });
  };
  expect_text(use([](Mbarrier& b) { mbarrier::arrive(b); }), {"no mbarrier lives at shared+0", "0xc5c5"});
  expect_text(use([](Mbarrier& b) { mbarrier::init(b, 0); }), {"0 arrivals"});
  expect_text(use([](Mbarrier& b) {
                mbarrier::init(b, 1);
                mbarrier::init(b, 1);
              }),
              {"init of a living barrier"});
  expect_text(use([](Mbarrier& b) {
                mbarrier::init(b, 1);
                mbarrier::invalidate(b);
                mbarrier::test(b, 0);
              }),
              {"no mbarrier lives"});
  expect_text(use([](Mbarrier& b) {
                mbarrier::init(b, 1);
                mbarrier::arrive_expect_bytes(b, 16);
                mbarrier::arrive(b);
              }),
              {"one arrival too many"});
  expect_text(use([](Mbarrier& b) {
                mbarrier::init(b, 1);
                mbarrier::wait(b, 2);
              }),
              {"parity 2"});
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

TEST(HostSync, AFailedKernelDestroysWhatItsThreadsOwn) {
  Machine machine;
  auto counted = std::make_shared<int>(0);
  machine.failure_of({1, 64, 0}, [&](std::byte*) {
    const std::shared_ptr<int> mine = counted;
    if (thread_index() == 63) throw std::runtime_error("stop");
    block::sync();
  });
  EXPECT_EQ(counted.use_count(), 1);
}

}  // namespace
}  // namespace deep_ep::test
