// Dispatch with hooks by rails: rows are handed on whatever the relay does with its hook.
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_rails_case.hpp"
#include "tests/cluster/recording_executor.hpp"

namespace deep_ep::test {
namespace {

constexpr Nodes kHookNodes{4, 2};

class LowLatencyRailHooksTest : public ClusterTest {};
DEEP_EP_BY_RAILS(LowLatencyRailHooksTest);

/// Cases that differ in everything that decides where rows lie.
std::vector<LowLatencyCase> hook_cases() {
  return {make_low_latency_case({.tokens = {5, 3, 0, 6}, .max_tokens = 6, .hidden = 512, .topk = 3, .seed = 1}),
          make_low_latency_case({.tokens = {2, 4, 4, 1},
                                 .max_tokens = 4,
                                 .hidden = 1024,
                                 .topk = 5,
                                 .format = oracle::RowFormat::bf16,
                                 .seed = 2}),
          make_low_latency_case({.tokens = {0, 7, 2, 3},
                                 .max_tokens = 7,
                                 .hidden = 128,
                                 .local_experts = 2,
                                 .format = oracle::RowFormat::nvfp4,
                                 .layout = LowLatencyLayout::rank_major,
                                 .weights = true,
                                 .seed = 3})};
}

BufferOptions options_for_hooks() { return rail_options(kHookNodes, 8, 1024); }

/// One rank after the other does not call its hook before all others have all their rows, its neighbour those too that
/// come through it.
TEST_P(LowLatencyRailHooksTest, NobodyWaitsForAHook) {
  DEEP_EP_NEEDS_RANKS(4);
  const std::vector<LowLatencyCase> cases = hook_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options_for_hooks());
    for (std::size_t round = 0; round < (under_sanitizer() ? 4 : 12); ++round) {
      const LowLatencyCase& one = cases[round % 3];
      const auto result = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, one)), rank.call());
      rank.executor()->synchronize(rank.stream());  // the send part ends by itself
      const bool late = rank.rank() == static_cast<int>(round % 4);
      for (const bool now : {!late, late}) {
        if (now) result.hook();
        if (now) check_low_latency_dispatch(rank, one, result);
        rank.bootstrap()->barrier();
      }
    }
    buffer.check();
    buffer.destroy();
  });
}

/// What comes through the rank that ends the call does not come: others do not wait for it.
TEST_P(LowLatencyRailHooksTest, AnExpertThatDoesNotExistOnOneRank) {
  DEEP_EP_NEEDS_RANKS(4);
  const LowLatencyCase one =
      make_low_latency_case({.tokens = {5, 4, 8, 1}, .max_tokens = 8, .hidden = 256, .local_experts = 2, .topk = 4});
  for (const bool hook : {false, true}) {
    run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
      BufferOptions options = options_for_hooks();
      options.timeout_s = patience();
      require_refusal_of_unknown_expert(rank, rank.buffer(options), one, hook);
    });
  }
}

/// Two are always in flight, received in any order; a rank without a hook hands on what others with hooks send, and the
/// other way round; calls of other shapes and combines come between.
TEST_P(LowLatencyRailHooksTest, TwoInFlightBesideCallsThatReceiveAtOnce) {
  DEEP_EP_NEEDS_RANKS(4);
  const std::vector<LowLatencyCase> cases = hook_cases();
  const RailCase other =
      make_rail_case({.tokens = {3, 6, 5, 2}, .max_tokens = 6, .hidden = 256, .topk = 4, .seed = 9}, kHookNodes);
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options_for_hooks());
    const auto send = [&](const LowLatencyCase& one) {
      return buffer.low_latency_dispatch(with_hook(upload_arguments(rank, one)), rank.call());
    };
    const LowLatencyHandle handle = dispatch_and_check(rank, buffer, other.calls.before).handle;
    for (std::size_t round = 0; round < (under_sanitizer() ? 3 : 12); ++round) {
      const LowLatencyCase& first = cases[round % 3];
      const LowLatencyCase& second = cases[(round + round / 3) % 3];
      const auto a = send(first);
      const auto b = send(second);
      if (round % 2 == 1) {  // it waits for all ranks, whoever has received what
        const auto combined = buffer.low_latency_combine(upload_combine(rank, other.calls, handle), rank.call());
        check_low_latency_combine(rank, other.calls, other.by_rails, combined.combined_x.view());
      }
      const auto& soon = (round + static_cast<std::size_t>(rank.rank())) % 2 == 0 ? b : a;
      soon.hook();
      check_low_latency_dispatch(rank, &soon == &a ? first : second, soon);
      a.hook();
      b.hook();
      check_low_latency_dispatch(rank, first, a);
      check_low_latency_dispatch(rank, second, b);
      if ((round + static_cast<std::size_t>(rank.rank())) % 3 == 0) {
        dispatch_and_check(rank, buffer, first);
      } else {
        const auto c = send(first);
        c.hook();
        check_low_latency_dispatch(rank, first, c);
      }
    }
    buffer.check();
    buffer.destroy();
  });
}

/// Hooks that are never called, at the end, too: what goes through that rank arrives.
TEST_P(LowLatencyRailHooksTest, NeverCalled) {
  DEEP_EP_NEEDS_RANKS(4);
  const std::vector<LowLatencyCase> cases = hook_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options_for_hooks());
    for (std::size_t round = 0; round < 3; ++round) {
      buffer.low_latency_dispatch(with_hook(upload_arguments(rank, cases[round])),
                                  rank.call());  // dropped with its hook
      dispatch_and_check(rank, buffer, cases[(round + 1) % 3]);
    }
    const auto last = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, cases[0])), rank.call());
    if (rank.rank() != 3) {
      last.hook();
      check_low_latency_dispatch(rank, cases[0], last);
    }
    buffer.destroy();
  });
}

/// A rank that never sends is named by the one on its rail, which waits for its rows, and by nobody else: the others
/// have not called their hooks.
TEST_P(LowLatencyRailHooksTest, ARailThatNeverSends) {
  DEEP_EP_NEEDS_RANKS(4);
  if (GetParam().placement == Placement::processes) GTEST_SKIP() << "a long wait, which is the same as with threads";
  if (under_thread_sanitizer()) GTEST_SKIP() << "it only waits for longer";
  constexpr int kAbsent = 3;
  constexpr int kItsRail = 1;
  const LowLatencyCase one = hook_cases()[0];
  run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
    BufferOptions options = options_for_hooks();
    options.timeout_s = rank.rank() == kItsRail ? short_deadline() : patience();
    Buffer& buffer = rank.buffer(options);
    if (rank.rank() != kAbsent) {
      const auto result = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, one)), rank.call());
      buffer.check();  // the send part waits for nobody
      if (rank.rank() == kItsRail) {
        result.hook();
        require_throws<TimeoutError>([&] { buffer.check(); }, {"low-latency dispatch", "rank 3"}, "on its rail");
      }
    }
    rank.bootstrap()->barrier();
    if (rank.rank() != kItsRail) buffer.check();
    rank.bootstrap()->barrier();
  });
}

/// Has so many streams only.
class FewStreamsExecutor final : public CountingExecutor {
 public:
  FewStreamsExecutor(const std::shared_ptr<Executor>& inner, int streams) : CountingExecutor(inner), left_(streams) {}
  StreamHandle create_stream() override {
    if (left_-- == 0) throw SystemError("no stream is left");
    return CountingExecutor::create_stream();
  }

 private:
  int left_;
};

/// If a rank gets none for what it hands on, all ranks hear of that, whichever of its streams is lacking.
TEST_P(LowLatencyRailHooksTest, ARankWithoutAStream) {
  DEEP_EP_NEEDS_RANKS(4);
  run_cluster(cluster(4), [&](Rank& rank) {
    constexpr int kMost = 20;
    BufferOptions options = options_for_hooks();
    options.low_latency.rails = LowLatencyRails::always;
    bool made = false;
    for (int streams = 1; !made && streams < kMost; ++streams) {  // the first is the one for set-up
      const auto executor = std::make_shared<FewStreamsExecutor>(rank.executor(), rank.rank() == 2 ? streams : 1000);
      std::string refused;
      try {
        Buffer buffer(rank.bootstrap(), executor, options);
        made = true;
        rank.bootstrap()->barrier();
        buffer.destroy();
      } catch (const SystemError& error) {
        refused = error.what();
      }
      require(made || refused.find("no stream is left") != std::string::npos,
              "with " + std::to_string(streams) + " streams this rank was told: " + refused);
    }
    require(made, "a buffer needs fewer streams");
  });
}

/// The kernel that hands on cannot be launched. Its stream comes back to the recording all the same, and so does the
/// receive part: there are no rows, so nobody waits for what is not handed on.
TEST_P(LowLatencyRailHooksTest, ARecordingInWhichTheRelayFailsCanEnd) {
  DEEP_EP_NEEDS_RANKS(4);
  if (GetParam().target != Target::host) GTEST_SKIP() << "recordings are played by the CPU";
  if (GetParam().placement == Placement::processes) GTEST_SKIP() << "as with threads";
  const LowLatencyCase none =
      make_low_latency_case({.tokens = {0, 0, 0, 0}, .max_tokens = 6, .hidden = 512, .topk = 3});
  run_cluster(cluster(4), [&](Rank& rank) {
    const auto executor = std::make_shared<RecordingExecutor>(rank.executor());
    BufferOptions options = options_for_hooks();
    options.low_latency.rails = LowLatencyRails::always;
    options.timeout_s = patience();
    Buffer buffer(rank.bootstrap(), executor, options);
    const LowLatencyDispatchArguments arguments = with_hook(upload_arguments(rank, none));
    executor->recording = true;
    executor->refused_launch = 2;  // the first is the send part's
    require_throws<Refused>([&] { buffer.low_latency_dispatch(arguments, rank.call()); }, {"refused"}, "the relay");
    executor->recording = false;
    executor->unjoined.erase(rank.stream());
    require(executor->unjoined.empty(), "a stream has not come back to the recording");
    for (const StreamHandle stream : {rank.stream(), buffer.comm_stream()}) rank.executor()->synchronize(stream);
    buffer.check();
    rank.bootstrap()->barrier();
  });
}

/// The kernel that hands on becomes part of the graph, on a stream that comes back to it.
TEST_P(LowLatencyRailHooksTest, InGraphs) {
  DEEP_EP_NEEDS_RANKS(4);
  if (GetParam().target != Target::host) GTEST_SKIP() << "recordings are played by the CPU";
  const std::vector<LowLatencyCase> cases = hook_cases();
  run_cluster(cluster(4), [&](Rank& rank) {
    const auto executor = std::make_shared<RecordingExecutor>(rank.executor());
    BufferOptions options = options_for_hooks();
    options.low_latency.rails = LowLatencyRails::always;
    options.timeout_s = patience();
    Buffer buffer(rank.bootstrap(), executor, options);
    const auto settle = [&] {
      for (const StreamHandle stream : {rank.stream(), buffer.comm_stream()}) rank.executor()->synchronize(stream);
    };
    const auto send = [&](const LowLatencyDispatchArguments& arguments) {
      return buffer.low_latency_dispatch(with_hook(arguments), rank.call());
    };
    const auto first = upload_arguments(rank, cases[0]);
    const auto second = upload_arguments(rank, cases[1]);
    executor->recording = true;
    const auto a = send(first);
    const auto b = send(second);
    a.hook();
    const auto c = send(first);
    b.hook();
    c.hook();
    executor->recording = false;
    executor->unjoined.erase(rank.stream());
    require(executor->unjoined.empty(), "a stream has not come back to the recording");
    for (int launch = 0; launch < 4; ++launch) {
      settle();
      for (const auto* const result : {&a, &b, &c}) {
        for (const TensorView& view : {result->recv_x.view(), result->recv_count.view()}) {
          if (launch > 0) rank.executor()->fill(view.data, 0xee, view.bytes(), rank.stream());
        }
      }
      settle();
      if (launch > 0) executor->replay();
      settle();
      check_low_latency_dispatch(rank, cases[0], a);
      check_low_latency_dispatch(rank, cases[1], b);
      check_low_latency_dispatch(rank, cases[0], c);
      // Calls that are not recorded, an even or an odd number of them.
      const LowLatencyCase& one = cases[2];
      const auto between = send(upload_arguments(rank, one));
      between.hook();
      check_low_latency_dispatch(rank, one, between);
      if (launch % 2 == 0)
        check_low_latency_dispatch(rank, one, buffer.low_latency_dispatch(upload_arguments(rank, one), rank.call()));
    }
    buffer.check();
    buffer.destroy();
  });
}

/// The same under many schedules of the CPU executor, the relay's rank late or not.
TEST(LowLatencyRailHookScheduleTest, EverySeedGivesTheSame) {
  const std::int64_t first = environment_number("DEEP_EP_TEST_FIRST_SCHEDULE", 1);
  const std::int64_t count = environment_number("DEEP_EP_TEST_SCHEDULES", under_sanitizer() ? 1 : 6);
  for (std::int64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("DEEP_EP_TEST_FIRST_SCHEDULE=" + std::to_string(seed));
    auto [nodes, shape, options] = rail_schedule(seed);
    shape.seed = static_cast<std::uint64_t>(seed);
    const LowLatencyCase one = make_low_latency_case(shape);
    shape.format = oracle::RowFormat::bf16;
    const LowLatencyCase other = make_low_latency_case(shape);
    ASSERT_NO_THROW(run_cluster(options, [&, of = nodes](Rank& rank) {
      Buffer& buffer = rank.buffer(rail_options(of, 11, 256));
      LowLatencyDispatchResult before;
      for (int i = 0; i < 6; ++i) {
        const LowLatencyCase& now = i % 2 == 0 ? one : other;
        auto result = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, now)), rank.call());
        if (i > 0) before.hook();
        if (i > 0 && (i + rank.rank()) % 4 == 1) check_low_latency_dispatch(rank, i % 2 == 0 ? other : one, before);
        before = std::move(result);
      }
      dispatch_and_check(rank, buffer, one);
      check_low_latency_dispatch(rank, other, before);
      buffer.check();
      buffer.destroy();
    }));
  }
}

}  // namespace
}  // namespace deep_ep::test
