// Hosts of different numbers of ranks: low-latency calls work there; normal mode is refused.

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/hosts_executor.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

constexpr int kUnevenRanks = 3;

ClusterOptions uneven_cluster() {
  ClusterOptions options{.ranks = kUnevenRanks, .host = {.multiprocessors = 2, .warps_per_block = 4}};
  return options;
}

/// Ranks 0 and 1 on one host, rank 2 on another one.
Buffer uneven_buffer(const Rank& rank) {
  BufferOptions options = low_latency_options(kUnevenRanks, 6, 256, patience());
  const auto host = [](int one) { return one / 2; };
  return Buffer(rank.bootstrap(), std::make_shared<HostsExecutor>(rank.executor(), rank.rank(), host), options);
}

TEST(LowLatencyUnevenNodes, CallsWork) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "the calls are those between equal nodes";
  const LowLatencyCombineCase one = make_low_latency_combine_case(
      {.tokens = {5, 4, 6}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3});
  run_cluster(uneven_cluster(), [&](Rank& rank) {
    Buffer buffer = uneven_buffer(rank);
    for (int call = 0; call < 2; ++call) dispatch_and_combine(rank, buffer, one, one.expected());
    buffer.check();
    buffer.destroy();
  });
}

TEST(LowLatencyUnevenNodes, NormalModeIsRefused) {
  const Case one = make_case({.tokens = {5, 4, 6}});
  run_cluster(uneven_cluster(), [&](Rank& rank) {
    Buffer buffer = uneven_buffer(rank);
    const auto refused = [&](const auto& call) {
      require_throws<InvalidArgument>(call, {"needs nodes of equally many consecutive ranks", "3 ranks are of 2 nodes"},
                                      "normal mode");
    };
    refused([&] { buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call()); });
    refused([&] { buffer.combine({}, rank.call()); });
    refused([&] { buffer.dispatch_elastic({}, rank.call()); });
    refused([&] { buffer.combine_elastic({}, rank.call()); });
    const WeightPrefetch weights{.redundant_expert_weights = {{}}, .expert_weights = {{}}};
    refused([&] { buffer.prefetch_weights(weights, rank.call()); });
    refused([&] { buffer.reduce_grads({}, rank.call()); });
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
