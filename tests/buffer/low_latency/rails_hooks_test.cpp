// Calls with hooks by rails: rows are handed on, sums of a node made and posted, whatever the rank that does so does
// with its own hook.
#include <functional>
#include <optional>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"
#include "tests/cluster/recording_executor.hpp"

namespace deep_ep::test {
namespace {

constexpr Nodes kHookNodes{4, 2};

class LowLatencyRailHooksTest : public ClusterTest {};
DEEP_EP_BY_RAILS(LowLatencyRailHooksTest);

enum class Hooked { dispatch, combine };
constexpr Hooked kBothHooked[] = {Hooked::dispatch, Hooked::combine};

struct HookCases {
  std::vector<LowLatencyCase> dispatches;
  std::vector<RailCase> combines;

  void add(const LowLatencyCaseShape& shape, const Nodes& nodes) {
    dispatches.push_back(make_low_latency_case(shape));
    combines.push_back(make_rail_case(shape, nodes));
  }
};

/// They differ in everything that decides where rows lie.
HookCases hook_cases() {
  HookCases cases;
  cases.add({.tokens = {5, 3, 0, 6}, .max_tokens = 6, .hidden = 512, .topk = 3, .seed = 1}, kHookNodes);
  cases.add({.tokens = {2, 4, 4, 1},
             .max_tokens = 4,
             .hidden = 1024,
             .topk = 5,
             .routing = oracle::Routing::some_dropped,
             .format = oracle::RowFormat::bf16,
             .seed = 2},
            kHookNodes);
  cases.add({.tokens = {0, 7, 2, 3},
             .max_tokens = 7,
             .hidden = 128,
             .local_experts = 2,
             .format = oracle::RowFormat::nvfp4,
             .layout = LowLatencyLayout::rank_major,
             .weights = true,
             .seed = 3},
            kHookNodes);
  return cases;
}

BufferOptions options_for_hooks() { return rail_options(kHookNodes, 8, 1024); }

/// A call that has been sent, and its results.
struct SentCall {
  std::function<void()> hook;  ///< none where it has received at once
  std::function<void()> check;
  std::vector<TensorView> outputs;
};

/// What a rank hands to calls of these cases; combines are of dispatches that it has made.
class HookedCalls {
 public:
  HookedCalls(Rank& rank, Buffer& buffer, const HookCases& cases) : rank_(rank), buffer_(buffer), cases_(cases) {
    for (const LowLatencyCase& one : cases.dispatches) dispatches_.push_back(upload_arguments(rank, one));
    for (const RailCase& one : cases.combines) {
      handles_.push_back(dispatch_and_check(rank, buffer, one.calls.before).handle);
    }
    for (std::size_t i = 0; i < cases.combines.size(); ++i) {
      combines_.push_back(upload_combine(rank, cases.combines[i].calls, handles_[i]));
    }
  }
  HookedCalls(const HookedCalls&) = delete;

  SentCall send(Hooked what, std::size_t which, bool hook = true) const {
    if (what == Hooked::dispatch) {
      LowLatencyDispatchArguments arguments = dispatches_[which];
      arguments.return_recv_hook = hook;
      const LowLatencyDispatchResult result = buffer_.low_latency_dispatch(arguments, rank_.call());
      return {result.hook,
              [=, this] { check_low_latency_dispatch(rank_, cases_.dispatches[which], result); },
              {result.recv_x.view(), result.recv_count.view()}};
    }
    LowLatencyCombineArguments arguments = combines_[which];
    arguments.return_recv_hook = hook;
    const LowLatencyCombineResult result = buffer_.low_latency_combine(arguments, rank_.call());
    const TensorView sums = result.combined_x.view();
    return {result.hook,
            [=, this, kept = result.combined_x] {
              check_low_latency_combine(rank_, cases_.combines[which].calls, cases_.combines[which].by_rails, sums);
            },
            {sums}};
  }
  void at_once(Hooked what, std::size_t which) const { send(what, which, false).check(); }

  /// Each of so many calls is received when the next is sent, and looked at then or not; the last one when one has
  /// come that receives at once.
  void one_behind(Hooked what, int count, const std::function<std::size_t(int)>& which,
                  const std::function<bool(int)>& looks) const {
    std::optional<SentCall> before;
    for (int i = 0; i < count; ++i) {
      SentCall now = send(what, which(i));
      if (before) before->hook();
      if (before && looks(i)) before->check();
      before = std::move(now);
    }
    at_once(what, which(count));
    before->check();
  }

 private:
  Rank& rank_;
  Buffer& buffer_;
  const HookCases& cases_;
  std::vector<LowLatencyDispatchArguments> dispatches_;
  std::vector<LowLatencyHandle> handles_;
  std::vector<LowLatencyCombineArguments> combines_;
};

/// Two are always in flight, received in any order, beside those of the other kind; a rank without a hook hands on, and
/// adds up, for others with hooks, and the other way round.
TEST_P(LowLatencyRailHooksTest, TwoInFlightBesideCallsThatReceiveAtOnce) {
  DEEP_EP_NEEDS_RANKS(4);
  const HookCases cases = hook_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options_for_hooks());
    const HookedCalls calls(rank, buffer, cases);
    for (const Hooked what : kBothHooked) {
      const Hooked other = what == Hooked::dispatch ? Hooked::combine : Hooked::dispatch;
      for (std::size_t round = 0; round < (under_sanitizer() ? 3 : 12); ++round) {
        const std::size_t first = round % 3;
        const std::size_t second = (round + round / 3) % 3;
        const std::size_t turn = round + static_cast<std::size_t>(rank.rank());
        const bool alone = what == Hooked::dispatch && round % 2 == 1;  // nothing of the other kind is in flight
        std::vector<SentCall> sent = {calls.send(what, first)};
        if (!alone) sent.push_back(calls.send(other, second));
        sent.push_back(calls.send(what, second));
        if (!alone && round % 2 == 1) sent[1].hook();
        if (alone || round % 4 > 1) calls.at_once(other, first);  // it waits for all ranks, whoever has received what
        const SentCall& soon = turn % 2 == 0 ? sent.front() : sent.back();
        soon.hook();
        soon.check();
        for (const SentCall& call : sent) call.hook();
        for (const SentCall& call : sent) call.check();
        const SentCall last = calls.send(what, first, turn % 3 != 0);
        if (last.hook) last.hook();
        last.check();
      }
    }
    buffer.check();
    buffer.destroy();
  });
}

/// Hooks that are never called, at the end, too: what goes through that rank arrives.
TEST_P(LowLatencyRailHooksTest, NeverCalled) {
  DEEP_EP_NEEDS_RANKS(4);
  const HookCases cases = hook_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options_for_hooks());
    {
      const HookedCalls calls(rank, buffer, cases);
      for (const Hooked what : kBothHooked) {
        for (std::size_t round = 0; round < 3; ++round) {
          calls.send(what, round);  // dropped with its hook
          calls.at_once(what, (round + 1) % 3);
        }
        const SentCall last = calls.send(what, 0);
        if (rank.rank() == 3) continue;
        last.hook();
        last.check();
      }
    }
    buffer.destroy();
  });
}

/// A rank calls neither of two hooks before the others have received both calls: it has handed on, or added up, for
/// both of them.
TEST_P(LowLatencyRailHooksTest, TwoWithoutTheirHooks) {
  DEEP_EP_NEEDS_RANKS(4);
  const HookCases cases = hook_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options_for_hooks());
    {
      const HookedCalls calls(rank, buffer, cases);
      for (const Hooked what : kBothHooked) {
        const SentCall sent[2] = {calls.send(what, 0), calls.send(what, 0)};
        const bool is_last = rank.rank() == 3;
        if (is_last) rank.bootstrap()->barrier();
        for (const SentCall& call : sent) {
          call.hook();
          call.check();
        }
        if (!is_last) rank.bootstrap()->barrier();
      }
    }
    buffer.check();
    buffer.destroy();
  });
}

/// A rank that never sends is named by those who hand on or add up for it, or with it, and by nobody else: the others
/// have not called their hooks.
TEST_P(LowLatencyRailHooksTest, ARankThatNeverSends) {
  DEEP_EP_NEEDS_RANKS(4);
  if (under_sanitizer()) GTEST_SKIP() << "it only waits for longer";
  constexpr int kAbsent = 3, kItsRail = 1, kItsNeighbour = 2;
  HookCases cases;  // it has no tokens, so nobody's send part waits for what it selects
  cases.add({.tokens = {4, 4, 4, 0}, .max_tokens = 4, .hidden = 256, .local_experts = 1, .topk = 4}, kHookNodes);
  for (const Hooked what : kBothHooked) {
    run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
      BufferOptions options = options_for_hooks();
      const bool waits = rank.rank() == kItsRail || (what == Hooked::combine && rank.rank() == kItsNeighbour);
      options.timeout_s = waits ? short_deadline() : patience();
      Buffer& buffer = rank.buffer(options);
      const HookedCalls calls(rank, buffer, cases);
      rank.executor()->synchronize(rank.stream());
      rank.bootstrap()->barrier();
      if (rank.rank() != kAbsent) {
        const SentCall call = calls.send(what, 0);
        rank.executor()->synchronize(rank.stream());  // the send part waits for nobody
        if (waits) {
          call.hook();
          const char* const name = what == Hooked::dispatch ? "low-latency dispatch" : "low-latency combine";
          require_throws<TimeoutError>([&] { buffer.check(); }, {name, "rank 3"}, "beside it");
        }
      }
      rank.bootstrap()->barrier();
      if (!waits) buffer.check();
      rank.bootstrap()->barrier();
    });
  }
}

/// A buffer by rails whose calls can be recorded.
struct RecordedBuffer {
  Rank& rank;
  std::shared_ptr<RecordingExecutor> executor = std::make_shared<RecordingExecutor>(rank.executor());
  Buffer buffer{rank.bootstrap(), executor, options()};

  explicit RecordedBuffer(Rank& of) : rank(of) {}
  static BufferOptions options() {
    BufferOptions options = options_for_hooks();
    options.low_latency.rails = LowLatencyRails::always;
    options.timeout_s = patience();
    return options;
  }
};

/// The kernel that hands on cannot be launched. Its stream comes back to the recording all the same, and so does the
/// receive part: there are no rows, so nobody waits for what is not handed on.
TEST_P(LowLatencyRailHooksTest, ARecordingInWhichTheRelayFailsCanEnd) {
  DEEP_EP_NEEDS_RANKS(4);
  if (GetParam().target != Target::host) GTEST_SKIP() << "recordings are played by the CPU";
  const LowLatencyCase none =
      make_low_latency_case({.tokens = {0, 0, 0, 0}, .max_tokens = 6, .hidden = 512, .topk = 3});
  run_cluster(cluster(4), [&](Rank& rank) {
    RecordedBuffer recorded(rank);
    const LowLatencyDispatchArguments arguments = with_hook(upload_arguments(rank, none));
    record(rank, *recorded.executor, [&] {
      recorded.executor->refused_launch = 2;  // the first is the send part's
      require_throws<Refused>([&] { recorded.buffer.low_latency_dispatch(arguments, rank.call()); }, {"refused"},
                              "the relay");
    });
    settle(rank, recorded.buffer);
    recorded.buffer.check();
    rank.bootstrap()->barrier();
  });
}

/// The kernel that hands on, or adds up, becomes part of the graph, on a stream that comes back to it.
TEST_P(LowLatencyRailHooksTest, InGraphs) {
  DEEP_EP_NEEDS_RANKS(4);
  if (GetParam().target != Target::host) GTEST_SKIP() << "recordings are played by the CPU";
  const HookCases cases = hook_cases();
  for (const Hooked what : kBothHooked) {
    run_cluster(cluster(4), [&](Rank& rank) {
      RecordedBuffer recorded(rank);
      {
        const HookedCalls calls(rank, recorded.buffer, cases);
        SentCall sent[3];
        record(rank, *recorded.executor, [&] {
          sent[0] = calls.send(what, 0);
          sent[1] = calls.send(what, 1);
          sent[0].hook();
          sent[2] = calls.send(what, 0);
          for (int i : {1, 2}) sent[i].hook();
        });
        for (int launch = 0; launch < (under_thread_sanitizer() ? 2 : 4); ++launch) {
          settle(rank, recorded.buffer);
          if (launch > 0) {
            for (const SentCall& call : sent) {
              for (const TensorView& view : call.outputs) {
                rank.executor()->fill(view.data, 0xee, view.bytes(), rank.stream());
              }
            }
            settle(rank, recorded.buffer);
            recorded.executor->replay();
            settle(rank, recorded.buffer);
          }
          for (const SentCall& call : sent) call.check();
          // Calls that are not recorded, an even or an odd number of them.
          const SentCall between = calls.send(what, 2);
          between.hook();
          between.check();
          if (launch % 2 == 0) calls.at_once(what, 2);
        }
      }
      recorded.buffer.check();
      recorded.buffer.destroy();
    });
  }
}

/// Nodes of several ranks, also by lanes, and more owners than a block has warps for.
TEST(LowLatencyRailHookShapes, OfNodesAndLanes) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "has no threads that the schedules have not";
  for (const auto& [nodes, lanes] : {std::pair{Nodes{9, 3}, 1}, std::pair{Nodes{4, 2}, 2}, std::pair{Nodes{6, 2}, 4}}) {
    if (under_sanitizer() && nodes.ranks > 4) continue;
    SCOPED_TRACE(std::to_string(nodes.ranks) + " ranks, lanes " + std::to_string(lanes));
    HookCases cases;
    cases.add({.tokens = std::vector<std::int64_t>(static_cast<std::size_t>(nodes.ranks), 9),
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
    BufferOptions buffer_options = rail_options(nodes, 9, 256);
    buffer_options.low_latency.lanes = lanes;
    ASSERT_NO_THROW(run_cluster(options, [&](Rank& rank) {
      Buffer& buffer = rank.buffer(buffer_options);
      const HookedCalls calls(rank, buffer, cases);
      calls.one_behind(
          Hooked::combine, 4, [](int) { return std::size_t{0}; }, [](int) { return true; });
      buffer.check();
      buffer.destroy();
    }));
  }
}

/// The same under many schedules of the CPU executor, some hooks late.
TEST(LowLatencyRailHookScheduleTest, EverySeedGivesTheSame) {
  under_schedules({.usually = 6}, [](std::uint64_t seed) {
    auto [nodes, shape, options] = rail_schedule(seed);
    shape.seed = seed;
    HookCases cases;
    cases.add(shape, nodes);
    shape.format = oracle::RowFormat::bf16;
    cases.dispatches.push_back(make_low_latency_case(shape));
    // In the other one all experts are of every second rank. The others have rows of nobody: what an owner selects
    // comes when their send parts have long ended.
    const LowLatencyCase every_second =
        select_nodes(cases.dispatches.back(), {nodes.ranks, 1}, [](int, int rank) { return rank % 2 == 1; });
    cases.combines.push_back(make_rail_case(make_combine_case_after(every_second), nodes));
    BufferOptions buffer_options = rail_options(nodes, 11, 256);
    buffer_options.low_latency.lanes = seed % 4 == 1 ? 2 : 1;
    run_cluster(options, [&](Rank& rank) {
      Buffer& buffer = rank.buffer(buffer_options);
      const HookedCalls calls(rank, buffer, cases);
      const auto looks = [&](int call) { return (call + rank.rank()) % 4 == 1; };
      calls.one_behind(
          Hooked::dispatch, 6, [](int call) { return static_cast<std::size_t>(call % 2); }, looks);
      // Both cases in each half of the memory.
      calls.one_behind(
          Hooked::combine, 6, [](int call) { return static_cast<std::size_t>(call / 2 % 2); }, looks);
      buffer.check();
      buffer.destroy();
    });
  });
}

}  // namespace
}  // namespace deep_ep::test
