// Engines fill the memory of low-latency calls with zeros between calls.
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"

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

TEST_P(LowLatencyScratchTest, MayBeZeroedBetweenCalls) {
  DEEP_EP_NEEDS_RANKS(kScratchRanks);
  const RailCase one =
      make_rail_case({.tokens = {5, 0, 3, 6}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3, .seed = 5},
                     kScratchNodes);
  for (const ScratchWay& way : kScratchWays) {
    SCOPED_TRACE(way.name);
    // A NIC may still write what nobody waits for, as selections of tokens that have no expert here: no harm, but a
    // race.
    if (under_thread_sanitizer() && way.ranks_per_node != kScratchRanks) continue;
    run_cluster(cluster(kScratchRanks), [&](Rank& rank) {
      Buffer& buffer = rank.buffer(scratch_options(way));
      const TensorView memory = buffer.low_latency_memory();
      require(memory.shape[0] == static_cast<std::int64_t>(buffer.options().low_latency.bytes / 128 * 128), "bytes");
      const auto round = [&] {
        const auto dispatched = dispatch_and_check(rank, buffer, one.calls.before);
        const auto combined =
            buffer.low_latency_combine(upload_combine(rank, one.calls, dispatched.handle), rank.call());
        check_low_latency_combine(rank, one.calls, way.rails == LowLatencyRails::always ? one.by_rails : one.direct,
                                  combined.combined_x.view());
      };
      for (int i = 0; i < 4; ++i) {
        round();
        rank.executor()->synchronize(rank.stream());
        rank.bootstrap()->barrier();  // no call is under way
        rank.executor()->fill(memory.data, 0, static_cast<std::size_t>(memory.shape[0]), rank.stream());
        rank.executor()->synchronize(rank.stream());
        rank.bootstrap()->barrier();
      }
      round();
      buffer.check();
      buffer.destroy();
    });
  }
}

}  // namespace
}  // namespace deep_ep::test
