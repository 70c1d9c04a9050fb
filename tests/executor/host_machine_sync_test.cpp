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

TEST(HostSync, ABarrierThatSomeNeverReachIsADeadlock) {
  Machine machine;
  const std::string text = machine.failure_of({2, 64, 0}, [](std::byte*) {
    if (block_index() == 1 && warp_index() == 0) return;
    block::sync();
  });
  expect_text(text, {"kernel probe", "block 1", "deadlock", "threads 0-31 have exited",
                     "threads 32-63 wait for their block (32 of 64 threads came)"});
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
                b.word = 0;
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

}  // namespace
}  // namespace deep_ep::test
