// Combine with hooks while one rank is late: within a node nobody's send part waits for it, whether rows travel as the
// experts left them or, with weights that the dispatch has brought, as sums.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

constexpr int kLateOwnerRanks = 3;

class LowLatencyLateOwnerTest : public ClusterTest {
 protected:
  /// Each case three times, so that a call also takes the places of an earlier one. One rank after the other is late:
  /// it begins a combine when the send parts of all others have ended, which it hears from them.
  static void run_with_late_ranks(const ClusterOptions& where, const std::vector<LowLatencyCombineCase>& cases,
                                  const BufferOptions& options, bool weights, bool at_once = false) {
    std::vector<std::vector<oracle::Combined>> expected;
    for (const auto& one : cases) expected.push_back(one.expected());
    run_with_buffers(where, options, [&](Rank& rank, Buffer& buffer) {
      int late = 0;
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, cases[i], weights);
        for (int round = 0; round < 3; ++round, late = (late + 1) % kLateOwnerRanks) {
          const LowLatencyCombineArguments arguments = upload_combine(rank, cases[i], handle);
          const auto send = [&] { return buffer.low_latency_combine(with_hook(arguments), rank.call()); };
          LowLatencyCombineResult result;
          if (rank.rank() != late) {
            result = send();
            rank.executor()->synchronize(rank.stream());
            // The rows have left: what they were made of may be overwritten.
            const std::vector<std::byte> other(arguments.x.bytes(), std::byte{0x3f});
            rank.executor()->copy(writable(arguments.x).data, other.data(), other.size(), rank.stream());
            rank.executor()->synchronize(rank.stream());
          }
          if (!at_once || round < 2) rank.bootstrap()->barrier();
          if (rank.rank() == late) result = send();
          result.hook();
          check_low_latency_combine(rank, cases[i], expected[i], result.combined_x.view());
          if (round != 1) continue;
          // A call in one launch uses the same memory.
          const LowLatencyCombineArguments again = upload_combine(rank, cases[i], handle);
          const LowLatencyCombineResult plain = buffer.low_latency_combine(again, rank.call());
          check_low_latency_combine(rank, cases[i], cases[i].expected(), plain.combined_x.view());
        }
      }
      buffer.check();
    });
  }

  /// Cases whose selections at combine are not those of dispatch, but where weights come with it: some gone, all
  /// weights others.
  static std::vector<LowLatencyCombineCase> cases(std::int64_t hidden, int topk, bool weights, std::uint64_t seed = 0) {
    std::vector<LowLatencyCombineCase> cases;
    for (const oracle::Routing routing : {oracle::Routing::uniform, oracle::Routing::duplicates}) {
      auto one = make_low_latency_combine_case({.tokens = {7, 5, 4},
                                                .max_tokens = 7 * topk,  // an expert may be named so often
                                                .hidden = hidden,
                                                .topk = topk,
                                                .routing = routing,
                                                .seed = 4 * seed + cases.size() + 1});
      if (!weights) change_selections(one, 0.2, 4 * seed + cases.size());
      cases.push_back(std::move(one));
    }
    return cases;
  }
};

DEEP_EP_ON_THREADS(LowLatencyLateOwnerTest);

TEST_P(LowLatencyLateOwnerTest, NobodyWaitsForItToSend) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "EverySeedGivesTheSame does the same";
  for (const bool weights : {false, true}) {
    run_with_late_ranks(cluster(kLateOwnerRanks), cases(640, 6, weights), low_latency_options(kLateOwnerRanks, 42, 640),
                        weights);
  }
}

/// Rank 1 has received neither of two calls when rank 0 sends the third, whose rows take the places of the first.
TEST_P(LowLatencyLateOwnerTest, PlacesOfACallThatIsNotReceivedAreLeftAlone) {
  const auto with_seed = [](std::uint64_t seed) {
    return make_low_latency_combine_case(
        {.tokens = {5, 9}, .max_tokens = 9, .hidden = 256, .local_experts = 4, .topk = 4, .seed = seed});
  };
  const LowLatencyCombineCase one = with_seed(3);
  const LowLatencyCombineCase third = with_seed(4);
  for (const bool weights : {false, true})
    run_with_buffers(cluster(2), low_latency_options(2, 9, 256), [&](Rank& rank, Buffer& buffer) {
      const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one, weights);
      const LowLatencyHandle other = dispatch_low_latency(rank, buffer, third, weights);
      const LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
      const LowLatencyCombineArguments last = upload_combine(rank, third, other);
      const auto results = send_third_before_the_other_receives(rank, [&](int call) {
        return buffer.low_latency_combine(with_hook(call < 2 ? arguments : last), rank.call());
      });
      const auto expected = one.expected();
      for (const std::size_t call : {0, 1}) {
        check_low_latency_combine(rank, one, expected, results[call].combined_x.view());
      }
      check_low_latency_combine(rank, third, third.expected(), results[2].combined_x.view());
      buffer.check();
    });
}

/// Two calls are always in flight, as with two micro-batches. A rank that has received the first has said so by that,
/// and not only by beginning the third: the others may send theirs.
TEST_P(LowLatencyLateOwnerTest, NobodyWaitsForItToSendTheCallAfterTheNext) {
  const LowLatencyCombineCase one = make_low_latency_combine_case(
      {.tokens = {7, 5, 4}, .max_tokens = 28, .hidden = 256, .local_experts = 4, .topk = 4, .seed = 7});
  for (const bool weights : {false, true})
    run_cluster(cluster(kLateOwnerRanks), [&](Rank& rank) {
      const auto expected = one.expected();
      Buffer& buffer = rank.buffer(low_latency_options(kLateOwnerRanks, 28, 256));
      const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one, weights);
      const LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
      const auto send = [&] { return buffer.low_latency_combine(with_hook(arguments), rank.call()); };
      std::vector<LowLatencyCombineResult> calls = {send(), send()};
      for (int late = 0; late < kLateOwnerRanks; ++late) {
        calls[calls.size() - 2].hook();
        rank.executor()->synchronize(rank.stream());
        rank.bootstrap()->barrier();
        if (rank.rank() != late) {
          calls.push_back(send());
          rank.executor()->synchronize(rank.stream());
        }
        rank.bootstrap()->barrier();
        if (rank.rank() == late) calls.push_back(send());
      }
      for (const auto& call : calls) {
        call.hook();
        check_low_latency_combine(rank, one, expected, call.combined_x.view());
      }
      buffer.check();
      buffer.destroy();
    });
}

/// A call ends when all rows have come, even those that nobody wants any more: later calls take the same places.
TEST_P(LowLatencyLateOwnerTest, ACallEndsWhenAllHaveSent) {
  LowLatencyCombineCase none = make_low_latency_combine_case(
      {.tokens = {4, 4}, .max_tokens = 4, .hidden = 256, .local_experts = 4, .topk = 4, .seed = 6});
  for (auto& input : none.inputs) std::fill(input.selection.idx.begin(), input.selection.idx.end(), -1);
  std::atomic<bool> begun = false;
  run_with_buffers(cluster(2), low_latency_options(2, 4, 256), [&](Rank& rank, Buffer& buffer) {
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, none);
    const LowLatencyCombineArguments arguments = upload_combine(rank, none, handle);
    if (rank.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // less hides a mistake, and harms nothing
      begun = true;
    }
    const LowLatencyCombineResult result = buffer.low_latency_combine(with_hook(arguments), rank.call());
    result.hook();
    rank.executor()->synchronize(rank.stream());
    require(begun, "the call has ended before rank 0 has sent");
    check_low_latency_combine(rank, none, none.expected(), result.combined_x.view());
    buffer.check();
  });
}

TEST_P(LowLatencyLateOwnerTest, EverySeedGivesTheSame) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "GPUs have schedules of their own";
  under_schedules({.usually = 4}, [&](std::uint64_t seed) {
    ClusterOptions options = cluster(kLateOwnerRanks);
    options.host = {.multiprocessors = under_thread_sanitizer() ? 2 : 3,
                    .warps_per_block = seed % 2 == 0 || under_thread_sanitizer() ? 4 : 8,
                    .seed = seed};
    const bool weights = seed / 2 % 2 == 0;
    run_with_late_ranks(options, cases(256, 4, weights, seed), low_latency_options(kLateOwnerRanks, 28, 256), weights,
                        true);
  });
}

}  // namespace
}  // namespace deep_ep::test
