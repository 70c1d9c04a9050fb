// Engines fill the memory of low-latency calls with zeros between calls, or use it for values of their own.
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/low_latency/params.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"
#include "tests/cluster/queue_pairs_executor.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyScratchTest : public ClusterTest {};
DEEP_EP_BY_RAILS(LowLatencyScratchTest);

constexpr int kScratchRanks = 4;
constexpr Nodes kScratchNodes{kScratchRanks, 2};

struct ScratchWay {
  const char* name;
  int ranks_per_node;
  LowLatencyRails rails;
  bool masking;
};
constexpr ScratchWay kScratchWays[] = {{"one node", kScratchRanks, LowLatencyRails::never, false},
                                       {"one node, masking", kScratchRanks, LowLatencyRails::never, true},
                                       {"two nodes", 2, LowLatencyRails::never, false},
                                       {"two nodes, masking", 2, LowLatencyRails::never, true},
                                       {"two nodes, by rails", 2, LowLatencyRails::always, false}};

BufferOptions scratch_options(const ScratchWay& way) {
  BufferOptions options = rail_options(kScratchNodes, 6, 256);
  options.ranks_per_node = way.ranks_per_node;
  options.low_latency.rails = way.rails;
  options.low_latency.masking = way.masking;
  return options;
}

/// In every way: five rounds of calls, and between them words that look like the next call's.
TEST_P(LowLatencyScratchTest, IsTheProgramsFromCleaningToCleaning) {
  const auto one = make_low_latency_combine_case(
      {.tokens = {5, 0, 3, 6}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3, .seed = 5});
  const Combined of_one_node = one.expected(), of_two = one.expected(2);
  for (const ScratchWay& way : kScratchWays) {
    SCOPED_TRACE(way.name);
    // A NIC may still write what nobody waits for, as selections of tokens that have no expert here: no harm, but a
    // race.
    if (under_thread_sanitizer() && way.ranks_per_node != kScratchRanks) continue;
    run_with_buffers(cluster(kScratchRanks), scratch_options(way), [&](Rank& rank, Buffer& buffer) {
      const TensorView memory = buffer.low_latency_memory();
      require(memory.shape[0] == static_cast<std::int64_t>(buffer.options().low_latency.bytes / 128 * 128), "bytes");
      for (std::uint64_t round = 1; round <= 5; ++round) {
        dispatch_and_combine(rank, buffer, one, way.ranks_per_node == kScratchRanks ? of_one_node : of_two);
        if (round == 5) break;
        // The number of the next call everywhere: signals, counts and rows seem to have come.
        const std::vector<std::uint64_t> anything(static_cast<std::size_t>(memory.shape[0]) / sizeof(std::uint64_t),
                                                  round + 1);
        buffer.low_latency_clean(rank.stream());
        rank.executor()->copy(memory.data, anything.data(), anything.size() * sizeof(std::uint64_t), rank.stream());
        rank.executor()->synchronize(rank.stream());  // of memory that ends here
        buffer.low_latency_clean(rank.stream());
      }
      buffer.check();
    });
  }
}

/// A queue pair's posted work leaves when the test says so.
class HeldDoorbell {
 public:
  explicit HeldDoorbell(RdmaQueuePair& queue) : bell_(std::exchange(queue.doorbell, &posted_)) {}
  std::uint64_t posted() const { return __atomic_load_n(&posted_, __ATOMIC_ACQUIRE); }
  void let_go() { __atomic_store_n(bell_, posted(), __ATOMIC_RELEASE); }

 private:
  std::uint64_t posted_ = 0;
  std::uint64_t* bell_;
};

/// Rank 0's selections are of its own expert, so rank 1 does not wait for them; and the NIC sends them late.
TEST_P(LowLatencyScratchTest, CleaningWaitsForSelectionsThatNobodyWaitsFor) {
  if (GetParam().target != Target::host || are_processes(GetParam())) GTEST_SKIP() << "the test plays a NIC's part";
  const LowLatencyCase one =
      make_low_latency_case({.tokens = {4, 4}, .max_tokens = 4, .hidden = 256, .local_experts = 1, .topk = 1});
  std::atomic<bool> cleaned = false, late = false;
  run_cluster(cluster(2), [&](Rank& rank) {
    BufferOptions options = low_latency_options(2, 4, 256);
    options.low_latency.allow_nvlink = false;
    options.low_latency.lanes = 1;
    std::optional<HeldDoorbell> held;
    const auto hold = [&](QueuePairsExecutor& pairs) {
      if (rank.rank() == 0) held.emplace(pairs.at(channel_of(LowLatencyKind::combine, 0), 1));
    };
    Buffer buffer(rank.bootstrap(),
                  std::make_shared<QueuePairsExecutor>(rank.executor(), 2, low_latency_channels(1), hold), options);
    buffer.low_latency_memory();
    LowLatencyDispatchArguments dispatch = upload_arguments(rank, one);
    dispatch.topk_idx = rank.upload(std::vector<std::int64_t>(4, rank.rank()), DType::int64, {4, 1});
    const LowLatencyDispatchResult dispatched = buffer.low_latency_dispatch(dispatch, rank.call());
    const LowLatencyCombineResult result =
        buffer.low_latency_combine(combine_anything(rank, dispatched.handle, dispatch.topk_idx, 1), rank.call());
    rank.executor()->synchronize(rank.stream());
    rank.bootstrap()->barrier();
    if (rank.rank() == 0) {
      const std::uint64_t selections = held->posted();
      require(selections != 0, "rank 0 has posted its selections");
      buffer.low_latency_clean(rank.stream());
      // The cleaning has to post there itself, to know. Or rank 1 has cleaned, and the program writes there.
      while (held->posted() == selections && !cleaned) std::this_thread::yield();
      late = held->posted() == selections;
      while (!cleaned) held->let_go(), std::this_thread::yield();
      held->let_go();
      rank.executor()->synchronize(rank.stream());
    } else {
      buffer.low_latency_clean(rank.stream());
      rank.executor()->synchronize(rank.stream());
      cleaned = true;
    }
    rank.bootstrap()->barrier();
    require(!late, "rank 1 has cleaned while selections were on their way to it");
    buffer.destroy();
  });
}

/// Says when memory is about to be cleaned, and records an event behind that.
class ToldExecutor final : public CountingExecutor {
 public:
  using CountingExecutor::CountingExecutor;
  std::function<void()> before_fill;
  EventHandle filled;

  void fill(void* memory, int value, std::size_t bytes, StreamHandle stream) override {
    if (before_fill) before_fill();
    CountingExecutor::fill(memory, value, bytes, stream);
    filled = record_event(stream);
  }
};

/// Rank 1 has come to the barrier once it has posted there: rank 0 may still write to the memory of rank 1 then.
TEST_P(LowLatencyScratchTest, IsCleanedBehindABarrier) {
  if (GetParam().target != Target::host || are_processes(GetParam())) GTEST_SKIP() << "the test plays a NIC's part";
  run_cluster(cluster(2), [&](Rank& rank) {
    BufferOptions options = low_latency_options(2, 4, 256);
    options.low_latency.allow_nvlink = false;
    options.low_latency.lanes = 1;
    std::optional<HeldDoorbell> held;
    const auto hold = [&](QueuePairsExecutor& pairs) {
      if (rank.rank() == 1) held.emplace(pairs.at(channel_of(LowLatencyKind::combine, 0), 0));
    };
    const auto told = std::make_shared<ToldExecutor>(rank.executor());
    Buffer buffer(rank.bootstrap(), std::make_shared<QueuePairsExecutor>(told, 2, low_latency_channels(1), hold),
                  options);
    buffer.low_latency_memory();
    bool early = false;
    if (rank.rank() == 1) {
      const std::uint64_t before = held->posted();
      buffer.low_latency_clean(rank.stream());
      while (held->posted() == before) std::this_thread::yield();
      early = rank.executor()->event_done(told->filled);
      const EventHandle end = rank.executor()->record_event(rank.stream());
      while (!rank.executor()->event_done(end)) held->let_go(), std::this_thread::yield();
    } else {
      buffer.low_latency_clean(rank.stream());
    }
    rank.executor()->synchronize(rank.stream());
    rank.bootstrap()->barrier();
    require(!early, "rank 1 has cleaned its memory before its barrier");
    buffer.destroy();
  });
}

/// Rows that a rank sends before another one has cleaned its memory would be lost.
TEST_P(LowLatencyScratchTest, NobodyGoesOnBeforeAllHaveCleaned) {
  if (GetParam().target != Target::host || are_processes(GetParam())) GTEST_SKIP() << "the test holds one rank up";
  std::atomic<bool> goes_on = false;
  run_cluster(cluster(2), [&](Rank& rank) {
    const auto executor = std::make_shared<ToldExecutor>(rank.executor());
    Buffer buffer(rank.bootstrap(), executor, low_latency_options(2, 4, 256));
    buffer.low_latency_memory();
    bool early = false;
    if (rank.rank() == 1) {
      executor->before_fill = [&] {
        const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(scaled(0.1));
        while (!goes_on && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        early = goes_on;
      };
    }
    buffer.low_latency_clean(rank.stream());
    rank.executor()->synchronize(rank.stream());
    if (rank.rank() == 0) goes_on = true;
    rank.bootstrap()->barrier();
    require(!early, "rank 0 goes on before rank 1 has cleaned");
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
