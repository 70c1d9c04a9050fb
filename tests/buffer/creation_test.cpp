// The cost of creating a buffer: exchanges between ranks, and memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "deep_ep/buffer.hpp"
#include "tests/cluster/counting_executor.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep::test {
namespace {

class CountedBootstrap final : public Bootstrap {
 public:
  explicit CountedBootstrap(std::shared_ptr<Bootstrap> inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override {
    ++exchanges;
    return inner_->all_gather(mine);
  }
  int exchanges = 0;

 private:
  std::shared_ptr<Bootstrap> inner_;
};

class CountedHeaps final : public CountingExecutor {
 public:
  using CountingExecutor::CountingExecutor;
  std::unique_ptr<SymmetricHeap> create_heap(Bootstrap& bootstrap, const HeapOptions& options) override {
    ++heaps;
    return CountingExecutor::create_heap(bootstrap, options);
  }
  int heaps = 0;
};

struct Cost {
  int exchanges = 0;
  int heaps = 0;
};

Cost cost_of(const BufferOptions& options, int ranks = 4) {
  std::vector<Cost> costs(static_cast<std::size_t>(ranks));
  expect_ranks_succeed(ranks, [&](const auto& bootstrap) {
    const auto counted = std::make_shared<CountedBootstrap>(bootstrap);
    const auto executor = std::make_shared<CountedHeaps>(make_host_executor());
    Buffer buffer(counted, executor, options);
    costs[static_cast<std::size_t>(bootstrap->rank())] = {counted->exchanges, executor->heaps};
    buffer.destroy();
  });
  for (const Cost& cost : costs) EXPECT_EQ(cost.exchanges, costs[0].exchanges);
  return costs[0];
}

TEST(Creation, BetweenNodesTakesEightExchangesAndOneHeap) {
  const Setting wire("DEEP_EP_RDMA_WIRE", "local");
  BufferOptions options;
  options.heap_bytes = std::size_t{16} << 20;
  options.low_latency.bytes = std::size_t{4} << 20;
  options.ranks_per_node = 2;
  const Cost between = cost_of(options);
  EXPECT_LE(between.exchanges, 8);
  EXPECT_EQ(between.heaps, 1);
  options.ranks_per_node = 0;
  const Cost within = cost_of(options);
  EXPECT_LE(within.exchanges, 5);
  EXPECT_EQ(within.heaps, 1);
}

}  // namespace
}  // namespace deep_ep::test
