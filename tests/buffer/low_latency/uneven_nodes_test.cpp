// Hosts of different numbers of ranks: low-latency calls work there, and name a lost rank; normal mode is refused.
#include <vector>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/hosts_executor.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

constexpr int kUnevenRanks = 3;

ClusterOptions uneven_cluster() {
  ClusterOptions options{.ranks = kUnevenRanks, .where = {}, .host = {}};
  options.host = {.multiprocessors = 2, .warps_per_block = 4};
  options.sits_out = true;
  return options;
}

/// Ranks 0 and 1 on one host, rank 2 on another one.
Buffer uneven_buffer(const Rank& rank) {
  BufferOptions options = low_latency_options(kUnevenRanks, 6, 256, short_deadline());
  const auto host = [](int one) { return one / 2; };
  return Buffer(rank.bootstrap(), std::make_shared<HostsExecutor>(rank.executor(), rank.rank(), host), options);
}

LowLatencyCombineCase uneven_case() {
  return make_low_latency_combine_case({.tokens = {5, 4, 6},
                                        .max_tokens = 6,
                                        .hidden = 256,
                                        .local_experts = 2,
                                        .topk = 3,
                                        .format = oracle::RowFormat::bf16});
}

TEST(LowLatencyUnevenNodes, ALostRankIsNamed) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "the calls are those between equal nodes";
  const LowLatencyCombineCase one = uneven_case();
  run_cluster(uneven_cluster(), [&](Rank& rank) {
    Buffer buffer = uneven_buffer(rank);
    for (int call = 0; call < 2; ++call) dispatch_and_combine(rank, buffer, one, one.expected());
    buffer.check();
    if (rank.rank() != 2) {
      const auto call = [&] {
        buffer.low_latency_dispatch(upload_arguments(rank, one.before), rank.call());
        buffer.check();
      };
      require_throws<TimeoutError>(call, {"for rank 2", "low-latency dispatch"}, "a lost rank");
    }
    rank.bootstrap()->barrier();  // no heap goes away while another rank's NIC may still write to it
  });
}

TEST(LowLatencyUnevenNodes, NormalModeIsRefused) {
  const Case one = make_case({.tokens = {5, 4, 6}});
  run_cluster(uneven_cluster(), [&](Rank& rank) {
    Buffer buffer = uneven_buffer(rank);
    require_throws<InvalidArgument>([&] { buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call()); },
                                    {"needs nodes of equally many consecutive ranks", "3 ranks are of 2 nodes"},
                                    "dispatch");
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
