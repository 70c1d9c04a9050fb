// Low-latency calls by rails together with others, which go directly: hooks, FP8; barriers.
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"

namespace deep_ep::test {
namespace {

using oracle::RowFormat;

TEST(LowLatencyRailScheduleTest, EverySeedGivesTheSame) {
  under_schedules({.usually = 8}, [](std::uint64_t seed) {
    const Nodes nodes = seed % 3 == 0 ? Nodes{6, 2} : Nodes{4, 2};
    LowLatencyCaseShape shape{
        .max_tokens = 11, .hidden = 256, .topk = 5, .routing = oracle::Routing::some_dropped, .seed = 3};
    shape.tokens =
        nodes.ranks == 6 ? std::vector<std::int64_t>{4, 0, 3, 5, 0, 2} : std::vector<std::int64_t>{9, 0, 11, 2};
    ClusterOptions options{
        .ranks = nodes.ranks,
        .where = {.topology = Topology::rails},
        .host = {
            .multiprocessors = 2, .warps_per_block = seed % 2 == 0 && !under_thread_sanitizer() ? 8 : 4, .seed = seed}};
    const LowLatencyCombineCase one = make_low_latency_combine_case(shape);
    const Combined expected = one.expected(2);
    LowLatencyCaseShape fp8 = shape;
    fp8.format = RowFormat::fp8;
    const LowLatencyCase other = make_low_latency_case(fp8);
    run_with_buffers(options, rail_options(nodes, 11, 256), [&](Rank& rank, Buffer& buffer) {
      for (int i = 0; i < 2; ++i) {
        dispatch_and_check(rank, buffer, other);
        const auto a = dispatch_and_check(rank, buffer, one.before);
        const auto b = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, other)), rank.call());
        const LowLatencyCombineArguments arguments = upload_combine(rank, one, a.handle);
        const auto later = buffer.low_latency_combine(with_hook(arguments), rank.call());
        combine_twice(rank, buffer, one, expected, a.handle);
        b.hook();
        check_low_latency_dispatch(rank, other, b);
        check_low_latency_combine(rank, one, expected, later.combined_x.view());
      }
      buffer.low_latency_clean(rank.call().stream);
      buffer.check();
    });
  });
}

class LowLatencyRailDisagreementTest : public ClusterTest {};
DEEP_EP_BY_RAILS(LowLatencyRailDisagreementTest);

/// Calls with hooks go directly, those without by rails: ranks that differ in hooks hear of it in either kind of call.
TEST_P(LowLatencyRailDisagreementTest, OnHooks) {
  constexpr Nodes kNodes{4, 2};
  const LowLatencyCombineCase one = make_low_latency_combine_case(
      {.tokens = {4, 4, 4, 4}, .max_tokens = 4, .hidden = 256, .local_experts = 1, .topk = 4});
  for (const bool combines : {false, true}) {
    expect_disagreement(
        cluster_with_absentees(kNodes.ranks), rail_options(kNodes, 4, 256, patience()), {"return_recv_hook"},
        [&](Rank& rank, Buffer& buffer, bool odd) {
          if (combines) {
            const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
            received(buffer.low_latency_combine(with_hook(upload_combine(rank, one, handle), odd), rank.call()));
          } else {
            received(buffer.low_latency_dispatch(with_hook(upload_arguments(rank, one.before), odd), rank.call()));
          }
        });
  }
}

}  // namespace
}  // namespace deep_ep::test
