// How many additions, entries and doorbells a poster takes for its rows: a budget.
#include <gtest/gtest.h>

#include <memory>

#include "csrc/executor/own_stream.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "deep_ep/executor.hpp"
#include "tests/kernels/test_kernel.hpp"
#include "tests/rdma/ring/poster_kernel.hpp"

namespace deep_ep::test {
namespace {

struct Cost {
  int rows = 0;
  int additions = 0;
  int doorbells = 0;
  bool operator==(const Cost&) const = default;
};
void PrintTo(const Cost& cost, std::ostream* out) {
  *out << cost.rows << " rows, " << cost.additions << " additions, " << cost.doorbells << " doorbells";
}

Cost cost(const std::shared_ptr<Executor>& executor, bool completes) {
  executor->make_current();
  const TestKernel<PosterCostParams> kernel(DEEP_EP_TEST_LAUNCHERS(poster_cost));
  const OwnStream stream(*executor);
  const rdma::RingMemory rings(executor, {.depth = 128, .batch = 64});
  Shared<FaultRecord> faults(*executor, 2);
  Shared<std::uint64_t> words(*executor, 2);
  PosterCostParams params;
  params.peer.queue = rings.queue_pair(0, 0x1234, /*peer=*/1);
  params.completion = rings.completion(0);
  params.completes = completes;
  params.told = words.data();
  params.wait = {faults.data(), words.data() + 1, 10'000'000'000u};
  kernel(*executor, stream.get(), {1, 32, 0}, params);
  executor->synchronize(stream.get());

  EXPECT_EQ(words[0], 32u) << "the peer has been told of all rows";
  Cost cost;
  const auto posted = static_cast<std::size_t>(*rings.producer_index(0));
  for (std::size_t i = 0; i < posted; ++i) {
    const auto* control = rings.ring(0)[i].segment[0].word;
    const std::uint32_t opcode = device::rdma::swap32(control[0]) & 0xff;
    cost.rows += opcode == device::rdma::kOpcodeWrite;
    cost.additions += opcode == device::rdma::kOpcodeFetchAdd;
    cost.doorbells += (control[2] >> 24 & device::rdma::kFlagSignalled) != 0;  // the last entry of each
  }
  return cost;
}

TEST(PosterCost, AnAdditionWaitsForTheOneBefore) {
  for (const auto& executor : executors_present()) {
    // Rows go at once. Behind the first one, nothing completes: one more addition at the end speaks for all others.
    EXPECT_EQ(cost(executor, false), (Cost{32, 2, 33}));
    // Where everything completes at once, every row is told of.
    EXPECT_EQ(cost(executor, true), (Cost{32, 32, 32}));
  }
}

}  // namespace
}  // namespace deep_ep::test
