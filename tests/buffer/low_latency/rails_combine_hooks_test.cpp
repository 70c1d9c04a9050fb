// Combine with hooks by rails: sums of a node are made and posted whatever the rank that makes them does with its hook.
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"
#include "tests/cluster/recording_executor.hpp"

namespace deep_ep::test {
namespace {

constexpr Nodes kSumNodes{4, 2};

class LowLatencyRailCombineHooksTest : public ClusterTest {};
DEEP_EP_BY_RAILS(LowLatencyRailCombineHooksTest);

/// Cases that differ in everything that decides where rows lie.
std::vector<RailCase> sum_cases() {
  return {make_rail_case({.tokens = {5, 3, 0, 6}, .max_tokens = 6, .hidden = 512, .topk = 3, .seed = 1}, kSumNodes),
          make_rail_case({.tokens = {2, 4, 4, 1},
                          .max_tokens = 4,
                          .hidden = 1024,
                          .topk = 5,
                          .routing = oracle::Routing::some_dropped,
                          .seed = 2},
                         kSumNodes),
          make_rail_case({.tokens = {0, 7, 2, 3},
                          .max_tokens = 7,
                          .hidden = 128,
                          .local_experts = 2,
                          .layout = LowLatencyLayout::rank_major,
                          .weights = true,
                          .seed = 3},
                         kSumNodes)};
}

BufferOptions options_for_sums() { return rail_options(kSumNodes, 8, 1024); }

/// What a rank hands to combine, after a dispatch of each case.
struct SumInputs {
  std::vector<LowLatencyHandle> handles;
  std::vector<LowLatencyCombineArguments> arguments;

  SumInputs(Rank& rank, Buffer& buffer, const std::vector<RailCase>& cases) {
    for (const RailCase& one : cases) handles.push_back(dispatch_and_check(rank, buffer, one.calls.before).handle);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      arguments.push_back(upload_combine(rank, cases[i].calls, handles[i]));
    }
  }
};

void check_sums(Rank& rank, const RailCase& one, const LowLatencyCombineResult& result) {
  check_low_latency_combine(rank, one.calls, one.by_rails, result.combined_x.view());
}

/// One rank after the other does not call its hook before all others have all their rows, its neighbour and its rail
/// those too that it adds up.
TEST_P(LowLatencyRailCombineHooksTest, NobodyWaitsForAHook) {
  DEEP_EP_NEEDS_RANKS(4);
  const std::vector<RailCase> cases = sum_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options_for_sums());
    const SumInputs inputs(rank, buffer, cases);
    for (std::size_t round = 0; round < (under_sanitizer() ? 4 : 12); ++round) {
      const auto result = buffer.low_latency_combine(with_hook(inputs.arguments[round % 3]), rank.call());
      rank.executor()->synchronize(rank.stream());  // the send part ends by itself
      const bool late = rank.rank() == static_cast<int>(round % 4);
      for (const bool now : {!late, late}) {
        if (now) result.hook();
        if (now) check_sums(rank, cases[round % 3], result);
        rank.bootstrap()->barrier();
      }
    }
    buffer.check();
    buffer.destroy();
  });
}

/// Two are always in flight, received in any order, also beside dispatches that wait for their hooks; a rank without a
/// hook adds up for others with hooks, and the other way round.
TEST_P(LowLatencyRailCombineHooksTest, TwoInFlightBesideCallsThatReceiveAtOnce) {
  DEEP_EP_NEEDS_RANKS(4);
  const std::vector<RailCase> cases = sum_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options_for_sums());
    const SumInputs inputs(rank, buffer, cases);
    const auto send = [&](std::size_t which) {
      return buffer.low_latency_combine(with_hook(inputs.arguments[which]), rank.call());
    };
    for (std::size_t round = 0; round < (under_sanitizer() ? 3 : 12); ++round) {
      const std::size_t first = round % 3;
      const std::size_t second = (round + round / 3) % 3;
      const auto a = send(first);
      const LowLatencyCase& between = cases[second].calls.before;
      const auto dispatched = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, between)), rank.call());
      const auto b = send(second);
      if (round % 2 == 1) dispatched.hook();
      if (round % 4 == 3) dispatch_and_check(rank, buffer, cases[first].calls.before);
      const bool in_order = (round + static_cast<std::size_t>(rank.rank())) % 2 == 0;
      (in_order ? a : b).hook();
      check_sums(rank, cases[in_order ? first : second], in_order ? a : b);
      a.hook();
      b.hook();
      dispatched.hook();
      check_sums(rank, cases[first], a);
      check_sums(rank, cases[second], b);
      check_low_latency_dispatch(rank, between, dispatched);
      if ((round + static_cast<std::size_t>(rank.rank())) % 3 == 0) {
        check_sums(rank, cases[first], buffer.low_latency_combine(inputs.arguments[first], rank.call()));
      } else {
        const auto c = send(first);
        c.hook();
        check_sums(rank, cases[first], c);
      }
    }
    buffer.check();
    buffer.destroy();
  });
}

/// Hooks that are never called, at the end, too: what goes through that rank arrives.
TEST_P(LowLatencyRailCombineHooksTest, NeverCalled) {
  DEEP_EP_NEEDS_RANKS(4);
  const std::vector<RailCase> cases = sum_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options_for_sums());
    {
      const SumInputs inputs(rank, buffer, cases);
      for (std::size_t round = 0; round < 3; ++round) {
        buffer.low_latency_combine(with_hook(inputs.arguments[round]), rank.call());  // dropped with its hook
        const std::size_t next = (round + 1) % 3;
        check_sums(rank, cases[next], buffer.low_latency_combine(inputs.arguments[next], rank.call()));
      }
      const auto last = buffer.low_latency_combine(with_hook(inputs.arguments[0]), rank.call());
      if (rank.rank() != 3) {
        last.hook();
        check_sums(rank, cases[0], last);
      }
    }
    buffer.destroy();
  });
}

/// A rank that never sends is named by those who add up for it, or with it, and by nobody else: the others have not
/// called their hooks.
TEST_P(LowLatencyRailCombineHooksTest, ARankThatNeverSends) {
  DEEP_EP_NEEDS_RANKS(4);
  if (GetParam().placement == Placement::processes) GTEST_SKIP() << "a long wait, which is the same as with threads";
  if (under_sanitizer()) GTEST_SKIP() << "it only waits for longer";
  constexpr int kAbsent = 3;
  // It has no tokens, so nobody's send part waits for what it selects.
  const RailCase one = make_rail_case(
      {.tokens = {4, 4, 4, 0}, .max_tokens = 4, .hidden = 256, .local_experts = 1, .topk = 4}, kSumNodes);
  run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
    BufferOptions options = options_for_sums();
    const bool waits = rank.rank() == 1 || rank.rank() == 2;  // its rail, its neighbour
    options.timeout_s = waits ? short_deadline() : patience();
    Buffer& buffer = rank.buffer(options);
    const LowLatencyHandle handle = dispatch_and_check(rank, buffer, one.calls.before).handle;
    rank.bootstrap()->barrier();
    if (rank.rank() != kAbsent) {
      const auto result = buffer.low_latency_combine(with_hook(upload_combine(rank, one.calls, handle)), rank.call());
      rank.executor()->synchronize(rank.stream());  // the send part waits for nobody
      if (waits) {
        result.hook();
        require_throws<TimeoutError>([&] { buffer.check(); }, {"low-latency combine", "rank 3"}, "beside it");
      }
    }
    rank.bootstrap()->barrier();
    if (!waits) buffer.check();
    rank.bootstrap()->barrier();
  });
}

/// One rank combines what another dispatch brought.
TEST_P(LowLatencyRailCombineHooksTest, RanksThatMeanOtherCalls) {
  DEEP_EP_NEEDS_RANKS(4);
  if (under_thread_sanitizer()) GTEST_SKIP() << "no rank returns the outcome of a race";
  const RailCase one = make_rail_case(
      {.tokens = {4, 4, 4, 4}, .max_tokens = 4, .hidden = 256, .local_experts = 1, .topk = 4}, kSumNodes);
  run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
    BufferOptions options = options_for_sums();
    options.timeout_s = short_deadline();
    Buffer& buffer = rank.buffer(options);
    const LowLatencyHandle first = dispatch_and_check(rank, buffer, one.calls.before).handle;
    const LowLatencyHandle second = dispatch_and_check(rank, buffer, one.calls.before).handle;
    const auto arguments = upload_combine(rank, one.calls, rank.rank() == 3 ? second : first);
    rank.bootstrap()->barrier();
    require_disagreement(rank, {"low_latency_combine"}, WhoFindsOut::somebody, [&] {
      buffer.low_latency_combine(with_hook(arguments), rank.call()).hook();
      buffer.check();
    });
  });
}

/// The kernel that adds up becomes part of the graph, on a stream that comes back to it.
TEST_P(LowLatencyRailCombineHooksTest, InGraphs) {
  DEEP_EP_NEEDS_RANKS(4);
  if (GetParam().target != Target::host) GTEST_SKIP() << "recordings are played by the CPU";
  const std::vector<RailCase> cases = sum_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    const auto executor = std::make_shared<RecordingExecutor>(rank.executor());
    BufferOptions options = options_for_sums();
    options.low_latency.rails = LowLatencyRails::always;
    options.timeout_s = patience();
    Buffer buffer(rank.bootstrap(), executor, options);
    const auto settle = [&] {
      for (const StreamHandle stream : {rank.stream(), buffer.comm_stream()}) rank.executor()->synchronize(stream);
    };
    {
      const SumInputs inputs(rank, buffer, cases);
      const auto send = [&](std::size_t which) {
        return buffer.low_latency_combine(with_hook(inputs.arguments[which]), rank.call());
      };
      executor->recording = true;
      const auto a = send(0);
      const auto b = send(1);
      a.hook();
      const auto c = send(0);
      b.hook();
      c.hook();
      executor->recording = false;
      executor->unjoined.erase(rank.stream());
      require(executor->unjoined.empty(), "a stream has not come back to the recording");
      for (int launch = 0; launch < (under_thread_sanitizer() ? 2 : 4); ++launch) {
        settle();
        for (const auto* const result : {&a, &b, &c}) {
          const TensorView view = result->combined_x.view();
          if (launch > 0) rank.executor()->fill(view.data, 0xee, view.bytes(), rank.stream());
        }
        settle();
        if (launch > 0) executor->replay();
        settle();
        check_sums(rank, cases[0], a);
        check_sums(rank, cases[1], b);
        check_sums(rank, cases[0], c);
        // Calls that are not recorded, an even or an odd number of them.
        const auto between = send(2);
        between.hook();
        check_sums(rank, cases[2], between);
        if (launch % 2 == 0) {
          check_sums(rank, cases[2], buffer.low_latency_combine(inputs.arguments[2], rank.call()));
        }
      }
    }
    buffer.check();
    buffer.destroy();
  });
}

/// Nodes of several ranks, also by lanes, and more owners than a block has warps for.
TEST(LowLatencyRailCombineHookShapes, OfNodesAndLanes) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "has no threads that the schedules have not";
  struct Of {
    Nodes nodes;
    int lanes;
  };
  for (const auto [nodes, lanes] : {Of{{9, 3}, 1}, Of{{4, 2}, 2}, Of{{6, 2}, 4}}) {
    if (under_sanitizer() && nodes.ranks > 4) continue;
    SCOPED_TRACE(std::to_string(nodes.ranks) + " ranks, lanes " + std::to_string(lanes));
    const RailCase one = make_rail_case({.tokens = std::vector<std::int64_t>(static_cast<std::size_t>(nodes.ranks), 9),
                                         .max_tokens = 9,
                                         .hidden = 256,
                                         .local_experts = 2,
                                         .topk = 5,
                                         .routing = oracle::Routing::some_dropped,
                                         .seed = static_cast<std::uint64_t>(nodes.ranks)},
                                        nodes);
    ClusterOptions options{.ranks = nodes.ranks, .where = {}, .host = {}};
    options.where.topology = Topology::rails;
    options.host = {.multiprocessors = 2, .warps_per_block = 4};
    ASSERT_NO_THROW(run_cluster(options, [&, of = nodes, by = lanes](Rank& rank) {
      BufferOptions buffer_options = rail_options(of, 9, 256);
      buffer_options.low_latency.lanes = by;
      Buffer& buffer = rank.buffer(buffer_options);
      const SumInputs inputs(rank, buffer, {one});
      LowLatencyCombineResult before;
      for (int i = 0; i < 4; ++i) {
        auto result = buffer.low_latency_combine(with_hook(inputs.arguments[0]), rank.call());
        if (i > 0) before.hook();
        if (i > 0) check_sums(rank, one, before);
        before = std::move(result);
      }
      check_sums(rank, one, buffer.low_latency_combine(inputs.arguments[0], rank.call()));
      check_sums(rank, one, before);
      buffer.check();
      buffer.destroy();
    }));
  }
}

/// The same under many schedules of the CPU executor, some hooks late.
TEST(LowLatencyRailCombineHookScheduleTest, EverySeedGivesTheSame) {
  const std::int64_t first = environment_number("DEEP_EP_TEST_FIRST_SCHEDULE", 1);
  const std::int64_t count = environment_number("DEEP_EP_TEST_SCHEDULES", under_sanitizer() ? 1 : 4);
  for (std::int64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("DEEP_EP_TEST_FIRST_SCHEDULE=" + std::to_string(seed));
    auto [nodes, shape, options] = rail_schedule(seed);
    shape.seed = static_cast<std::uint64_t>(seed);
    shape.format = oracle::RowFormat::bf16;
    // In the other one all experts are of every second rank. The others have rows of nobody: what an owner selects
    // comes when their send parts have long ended.
    LowLatencyCase every_second = make_low_latency_case(shape);
    every_second = select_nodes(every_second, {nodes.ranks, 1}, [](int, int rank) { return rank % 2 == 1; });
    const std::vector<RailCase> cases = {make_rail_case(shape, nodes),
                                         make_rail_case(make_combine_case_after(every_second), nodes)};
    ASSERT_NO_THROW(run_cluster(options, [&, of = nodes](Rank& rank) {
      BufferOptions buffer_options = rail_options(of, 11, 256);
      buffer_options.low_latency.lanes = seed % 4 == 1 ? 2 : 1;
      Buffer& buffer = rank.buffer(buffer_options);
      const SumInputs inputs(rank, buffer, cases);
      const auto which = [](int call) { return static_cast<std::size_t>(call / 2 % 2); };  // both in each half
      LowLatencyCombineResult before;
      for (int i = 0; i < 6; ++i) {
        auto result = buffer.low_latency_combine(with_hook(inputs.arguments[which(i)]), rank.call());
        if (i > 0) before.hook();
        if (i > 0 && (i + rank.rank()) % 4 == 1) check_sums(rank, cases[which(i - 1)], before);
        before = std::move(result);
      }
      check_sums(rank, cases[1], buffer.low_latency_combine(inputs.arguments[1], rank.call()));
      check_sums(rank, cases[which(5)], before);
      buffer.check();
      buffer.destroy();
    }));
  }
}

}  // namespace
}  // namespace deep_ep::test
