// All calls that reach other nodes over the wire `simulated`: kernels ring, and a kernel plays the NIC.
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep::test {
namespace {

class SimulatedNicTest : public ClusterTest {
 protected:
  ClusterOptions few_blocks(int ranks, std::uint64_t seed = 0) const {
    ClusterOptions options = cluster(ranks);
    options.host = {.multiprocessors = 2, .warps_per_block = 4, .seed = seed};
    return options;
  }

 private:
  Setting wire_{"DEEP_EP_RDMA_WIRE", "simulated"};
};
// Ranks on the CPU that are threads: the tests of lanes.
constexpr Where kSimulatedPlaces[] = {{Target::host, Placement::processes, Topology::two_nodes},
                                      {Target::cuda, Placement::threads, Topology::only_rdma},
                                      {Target::cuda, Placement::threads, Topology::rails},
                                      {Target::cuda, Placement::processes, Topology::two_nodes}};
INSTANTIATE_TEST_SUITE_P(On, SimulatedNicTest, testing::ValuesIn(kSimulatedPlaces), name_of_place);

TEST_P(SimulatedNicTest, LowLatencyCalls) {
  DEEP_EP_NEEDS_RANKS(4);
  const RailCase rail_case =
      make_rail_case({.tokens = {5, 4, 6, 0}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3}, {4, 2});
  const LowLatencyCombineCase& one = rail_case.calls;
  const Combined& expected = GetParam().topology == Topology::rails ? rail_case.by_rails : rail_case.direct;
  const std::uint64_t times = under_sanitizer() ? 1 : 3;  // of seeds, and of calls
  for (std::uint64_t seed = 0; seed < times; ++seed) {
    run_cluster(few_blocks(4, seed), [&](Rank& rank) {
      Buffer& buffer = rank.buffer(low_latency_options(4, 6, 256));
      require(buffer.describe().find("wire simulated") != std::string::npos, buffer.describe());
      for (std::uint64_t call = 0; call < times; ++call) {
        dispatch_and_check(rank, buffer, one.before);
        const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
        const Tensor combined = buffer.low_latency_combine(upload_combine(rank, one, handle), rank.call()).combined_x;
        check_low_latency_combine(rank, one, expected, combined.view());
      }
      buffer.destroy();
    });
  }
}

/// Topologies are of low-latency calls.
class SimulatedNicNormalTest : public SimulatedNicTest {};
constexpr Where kSimulatedNormalPlaces[] = {
    {Target::host, Placement::processes}, {Target::cuda, Placement::threads}, {Target::cuda, Placement::processes}};
INSTANTIATE_TEST_SUITE_P(On, SimulatedNicNormalTest, testing::ValuesIn(kSimulatedNormalPlaces), name_of_place);

TEST_P(SimulatedNicNormalTest, BetweenNodes) {
  DEEP_EP_NEEDS_RANKS(4);
  run_cluster(few_blocks(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{16} << 20, .ranks_per_node = 2});
    for (const std::int64_t tokens : {16, 70}) {
      if (under_thread_sanitizer() && tokens > 16) continue;  // the same threads
      run_round(rank, buffer, make_case({.tokens = equal_tokens(4, tokens), .ranks_per_node = 2}), {});
      rank.release();
    }
    require(buffer.describe().find("wire simulated") != std::string::npos, buffer.describe());
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
