// Low-latency calls by rails together with others: hooks, FP8, barriers, many calls, schedules; ranks that disagree.
#include <functional>

#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"

namespace deep_ep::test {
namespace {

using oracle::RowFormat;

constexpr Nodes kTwoNodes{4, 2};

class LowLatencyRailCallsTest : public ClusterTest {};
DEEP_EP_BY_RAILS(LowLatencyRailCallsTest);

/// Cases that differ in everything that decides where rows lie.
std::vector<RailCase> rail_cases() {
  return {make_rail_case({.tokens = {5, 3, 0, 6}, .max_tokens = 6, .hidden = 512, .topk = 3, .seed = 1}, kTwoNodes),
          make_rail_case({.tokens = {2, 4, 4, 1}, .max_tokens = 4, .hidden = 1024, .topk = 5, .seed = 2}, kTwoNodes),
          make_rail_case({.tokens = {0, 7, 2, 3},
                          .max_tokens = 7,
                          .hidden = 128,
                          .local_experts = 2,
                          .layout = LowLatencyLayout::rank_major,
                          .weights = true,
                          .seed = 3},
                         kTwoNodes)};
}

BufferOptions options_for_rails() { return rail_options(kTwoNodes, 8, 1024); }

/// FP8 goes directly; barriers go their own way; a communication stream receives at once, so by rails.
TEST_P(LowLatencyRailCallsTest, BetweenRowsInFp8BarriersAndStreams) {
  DEEP_EP_NEEDS_RANKS(4);
  const std::vector<RailCase> cases = rail_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options_for_rails());
    CallOptions asynchronous = rank.call();
    asynchronous.async_finish = true;
    for (std::size_t round = 0; round < (under_thread_sanitizer() ? 2 : 6); ++round) {
      const RailCase& one = cases[round % 3];
      LowLatencyCombineCase fp8 = one.calls;
      fp8.options.fp8 = true;
      const auto dispatched = buffer.low_latency_dispatch(upload_arguments(rank, one.calls.before), asynchronous);
      rank.executor()->wait_event(rank.stream(), dispatched.event);
      check_low_latency_dispatch(rank, one.calls.before, dispatched);
      if (round % 2 == 0) buffer.low_latency_clean(rank.call().stream);
      const auto arguments = upload_combine(rank, one.calls, dispatched.handle);
      const auto lossy = buffer.low_latency_combine(upload_combine(rank, fp8, dispatched.handle), rank.call());
      const auto combined = buffer.low_latency_combine(arguments, asynchronous);
      rank.executor()->wait_event(rank.stream(), combined.event);
      if (round % 2 == 1) buffer.low_latency_clean(rank.call().stream);
      check_low_latency_combine(rank, fp8, fp8.expected(), lossy.combined_x.view());
      check_low_latency_combine(rank, one.calls, one.by_rails, combined.combined_x.view());
    }
    buffer.check();
    buffer.destroy();
  });
}

/// The same calls under many schedules of the CPU executor.
TEST(LowLatencyRailScheduleTest, EverySeedGivesTheSame) {
  const std::int64_t first = environment_number("DEEP_EP_TEST_FIRST_SCHEDULE", 1);
  const std::int64_t count = environment_number("DEEP_EP_TEST_SCHEDULES", under_sanitizer() ? 1 : 8);
  for (std::int64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("DEEP_EP_TEST_FIRST_SCHEDULE=" + std::to_string(seed));
    auto [nodes, shape, options] = rail_schedule(seed);
    shape.seed = 3;
    const RailCase one = make_rail_case(shape, nodes);
    LowLatencyCaseShape fp8 = shape;
    fp8.format = RowFormat::fp8;
    const LowLatencyCase other = make_low_latency_case(fp8);
    ASSERT_NO_THROW(run_cluster(options, [&, of = nodes](Rank& rank) {
      Buffer& buffer = rank.buffer(rail_options(of, 11, 256));
      for (int i = 0; i < 2; ++i) {
        dispatch_and_check(rank, buffer, other);
        const auto a = dispatch_and_check(rank, buffer, one.calls.before);
        const auto b = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, other)), rank.call());
        const LowLatencyCombineArguments arguments = upload_combine(rank, one.calls, a.handle);
        const auto later = buffer.low_latency_combine(with_hook(arguments), rank.call());
        combine_both_ways(rank, buffer, one.calls, one.by_rails, a.handle);
        b.hook();
        check_low_latency_dispatch(rank, other, b);
        check_low_latency_combine(rank, one.calls, one.by_rails, later.combined_x.view());
      }
      buffer.low_latency_clean(rank.call().stream);
      buffer.check();
      buffer.destroy();
    }));
  }
}

/// Without being asked for rails, calls with a hook go directly. Rows that do, and rows that do not, may take the same
/// place.
TEST_P(LowLatencyRailCallsTest, OneRankAsksForAHookOfCombine) {
  DEEP_EP_NEEDS_RANKS(4);
  if (under_thread_sanitizer()) GTEST_SKIP() << "no rank returns the outcome of a race";
  // Every token goes everywhere, so every rank waits for something of every other. So many may come that rails pay.
  const RailCase one = make_rail_case(
      {.tokens = {4, 4, 4, 4}, .max_tokens = 128, .hidden = 4096, .local_experts = 1, .topk = 4}, kTwoNodes);
  run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
    BufferOptions options = rail_options(kTwoNodes, 128, 4096);
    options.timeout_s = short_deadline();
    Buffer buffer(rank.bootstrap(), rank.executor(), options);
    const auto dispatched = dispatch_and_check(rank, buffer, one.calls.before);
    const auto arguments = upload_combine(rank, one.calls, dispatched.handle);
    const bool hook = rank.rank() == 1;
    rank.bootstrap()->barrier();
    require_disagreement(rank, {"low_latency_combine", "return_recv_hook"}, WhoFindsOut::somebody, [&] {
      const auto result = buffer.low_latency_combine(hook ? with_hook(arguments) : arguments, rank.call());
      if (result.hook) result.hook();
      buffer.check();
    });
  });
}

}  // namespace
}  // namespace deep_ep::test
