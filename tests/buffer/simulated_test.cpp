// Calls on a fabric that connects rails only, over the wire `simulated`.
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"
#include "tests/support/setting.hpp"

namespace deep_ep::test {
namespace {

/// Two nodes of two ranks on a fabric whose NICs reach those of their own rail alone.
class RailsOnlyTest : public ClusterTest {
 protected:
  ClusterOptions few_blocks() const {
    ClusterOptions options = cluster(4);
    options.host = {.multiprocessors = 2, .warps_per_block = 4};
    return options;
  }
  LowLatencyCombineCase rail_case() const {
    return make_low_latency_combine_case(
        {.tokens = {5, 4, 6, 0}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3});
  }

 private:
  Setting wire_{"DEEP_EP_RDMA_WIRE", "simulated:rails=2"};
};
constexpr Where kRailsOnlyPlaces[] = {{Target::host, Placement::threads, Topology::two_nodes},
                                      {Target::host, Placement::threads, Topology::rails},
                                      {Target::host, Placement::processes, Topology::two_nodes},
                                      {Target::cuda, Placement::threads, Topology::two_nodes}};
INSTANTIATE_TEST_SUITE_P(On, RailsOnlyTest, testing::ValuesIn(kRailsOnlyPlaces), name_of_place);

TEST_P(RailsOnlyTest, LowLatencyCallsWithHooksAndWithout) {
  const LowLatencyCombineCase one = rail_case();
  const Combined expected = one.expected(ranks_per_node_of(GetParam().topology, 4));
  run_with_buffers(few_blocks(), low_latency_options(4, 6, 256), [&](Rank& rank, Buffer& buffer) {
    require(buffer.describe().find("rails only") != std::string::npos, buffer.describe());
    for (int call = 0; call < 2; ++call) {
      const auto sent = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, one.before)), rank.call());
      check_low_latency_dispatch(rank, one.before, received(sent));
      const auto dispatched = dispatch_and_check(rank, buffer, one.before);
      combine_twice(rank, buffer, one, expected, dispatched.handle);
      const auto combine = with_hook(upload_combine(rank, one, dispatched.handle));
      const Tensor combined = received(buffer.low_latency_combine(combine, rank.call())).combined_x;
      check_low_latency_combine(rank, one, expected, combined.view());
      buffer.low_latency_clean(rank.call().stream);
    }
    buffer.check();
  });
}

TEST_P(RailsOnlyTest, MasksAndNewConnections) {
  const LowLatencyCase all = rail_case().before;
  oracle::Masks masks(16, 0);
  for (const std::size_t other : {0u, 2u, 3u}) masks[4 + other] = masks[4 * other + 1] = 1;
  const LowLatencyCase apart = with_masks(all, masks);
  run_with_buffers(few_blocks(), low_latency_options(4, 6, 256, patience(), true), [&](Rank& rank, Buffer& buffer) {
    dispatch_and_check(rank, buffer, all);
    for (int other = 0; other < 4; ++other) {
      if ((rank.rank() == 1) != (other == 1)) buffer.low_latency_update_mask(other, true, rank.call().stream);
    }
    dispatch_and_check(rank, buffer, apart);
    buffer.low_latency_resume();
    require(buffer.describe().find("rails only") != std::string::npos, buffer.describe());
    dispatch_and_check(rank, buffer, all);
    buffer.check();
  });
}

TEST_P(RailsOnlyTest, WithoutItLowLatencyIsRefusedAndNormalModeWorks) {
  const Setting direct("DEEP_EP_RAIL_ONLY", "0");
  run_cluster(few_blocks(), [&](Rank& rank) {
    require_throws<SystemError>([&] { rank.buffer(low_latency_options(4, 6, 256)); }, {"has no route to rail"},
                                "low latency");
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{16} << 20, .ranks_per_node = 2});
    run_round(rank, buffer, make_case({.tokens = equal_tokens(4, 16), .ranks_per_node = 2}), {});
    require(buffer.describe().find("rails only") == std::string::npos, buffer.describe());
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
