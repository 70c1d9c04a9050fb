// When low-latency calls may use the places of an earlier call, and what becomes of rows that never came into theirs.
#include <cstring>
#include <functional>

#include "csrc/buffer/buffer_plan.hpp"
#include "kernels/low_latency/params.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyPlacesTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyPlacesTest);

/// Rank 1 has received neither of two calls when rank 0 sends the third, whose rows take the places of the first. It
/// has acknowledged calls before: a far rank is told of each by an addition.
TEST_P(LowLatencyPlacesTest, ACallWaitsForTheReceiverOfTheCallBeforeTheLast) {
  std::vector<LowLatencyCase> cases;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    cases.push_back(make_low_latency_case({.tokens = {6, 5}, .max_tokens = 6, .hidden = 512, .topk = 4, .seed = seed}));
  }
  run_with_buffers(cluster(2), low_latency_options(2, 6, 512), [&](Rank& rank, Buffer& buffer) {
    const auto send = [&](int call) {
      return buffer.low_latency_dispatch(with_hook(upload_arguments(rank, cases[index(call)])), rank.call());
    };
    for (const LowLatencyCase& before : cases) dispatch_and_check(rank, buffer, before);
    std::vector<LowLatencyDispatchResult> results = send_third_before_the_other_receives(rank, send);
    results.push_back(send(3));
    results[3].hook();
    for (std::size_t call = 0; call < results.size(); ++call) {
      check_low_latency_dispatch(rank, cases[call], results[call]);
    }
    buffer.check();
  });
}

/// With a look into the window of rank 0, and a hand in it.
class LowLatencyWindowTest : public testing::Test {
 protected:
  static void on_two_ranks(const std::function<void(Rank&, Buffer&)>& body) {
    run_cluster({.ranks = 2}, [&](Rank& rank) { body(rank, rank.buffer(options())); });
  }
  /// By both ranks, when rank 1 has sent: takes the first row that rank 0 has of it in the first call of that kind, or
  /// that line of it.
  static bool lose_row(Rank& rank, const Buffer& buffer, LowLatencyKind kind, std::size_t row_bytes, int line = -1) {
    rank.executor()->synchronize(rank.stream());
    rank.bootstrap()->barrier();
    if (rank.rank() != 0) return false;
    std::byte* const row = window().rows[static_cast<int>(kind)].at(1, 1, 0, row_bytes).in(heap_of(buffer));
    if (line < 0) {
      std::memset(row, 0, row_bytes);
    } else {
      std::memset(row + line * kTaggedLine, 0, kTaggedLine);
    }
    return true;
  }

  static constexpr std::int64_t kMostHidden = 12288;
  static LowLatencyWindow window() {
    return BufferPlan::make(options(), NodeMembership::of_domains(0, std::vector(2, 0), 2)).layout.low_latency;
  }
  static std::byte* heap_of(const Buffer& buffer) {
    const HeapLayout layout = BufferPlan::make(options(), NodeMembership::of_domains(0, std::vector(2, 0), 2)).layout;
    return static_cast<std::byte*>(buffer.local_memory().data) - layout.window_at();
  }

 private:
  static BufferOptions options() { return low_latency_options(2, 6, kMostHidden, short_deadline(), true); }
};

// Rank 1 is lost after it has sent nearly everything: what is missing at rank 0 is a row. Some blocks of rank 0 have
// received with it by then; in the end all is as if it had sent nothing.

TEST_F(LowLatencyWindowTest, AllIsReceivedAgainWithoutTheRank) {
  LowLatencyCaseShape shape{.tokens = {5, 6}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3, .seed = 7};
  LowLatencyRow row{.hidden = 256, .num_topk = 3, .format = LowLatencyFormat::fp8};
  for (const bool line : {false, true}) {
    if (line) {  // one with nothing but scales, behind the four lines that a warp takes at once
      shape.hidden = row.hidden = kMostHidden;
      shape.format = oracle::RowFormat::nvfp4;
      row.format = LowLatencyFormat::nvfp4;
      ASSERT_GT(row.payload_at(), 5 * kTaggedPayload);
    }
    const LowLatencyCase all = make_low_latency_case(shape);
    const LowLatencyCase without = with_masks(all, {0, 1, 0, 0});
    on_two_ranks([&](Rank& rank, Buffer& buffer) {
      if (rank.rank() == 1) buffer.low_latency_dispatch(with_hook(upload_arguments(rank, all)), rank.call());
      if (!lose_row(rank, buffer, LowLatencyKind::dispatch, row.bytes(), line ? 4 : -1)) return;
      LowLatencyDispatchArguments arguments = upload_arguments(rank, all);
      arguments.cumulative_local_expert_recv_stats = rank.upload(std::vector<std::int32_t>{7, 9}, DType::int32, {2});
      check_low_latency_dispatch(rank, without, buffer.low_latency_dispatch(arguments, rank.call()));
      const auto& count = without.dispatched.received[0].count;
      require_same({7 + count[0], 9 + count[1]},
                   rank.download<std::int32_t>(*arguments.cumulative_local_expert_recv_stats), "statistics");
    });
  }
}

TEST_F(LowLatencyWindowTest, AllIsAddedAgainWithoutTheRank) {
  const LowLatencyCombineCase all = make_low_latency_combine_case(
      {.tokens = {6, 5}, .max_tokens = 6, .hidden = 256, .local_experts = 1, .topk = 2, .seed = 8});
  LowLatencyCombineCase without = all;
  without.options.masks = {0, 1, 0, 0};
  const auto expected = without.expected();
  on_two_ranks([&](Rank& rank, Buffer& buffer) {
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, all);
    const auto result = buffer.low_latency_combine(with_hook(upload_combine(rank, all, handle)), rank.call());
    if (!lose_row(rank, buffer, LowLatencyKind::combine, tagged_lines(2 * 256) * kTaggedLine)) return;
    result.hook();
    check_low_latency_combine(rank, all, expected, result.combined_x.view());
  });
}

/// While it receives a call, it has finished the one before.
TEST_F(LowLatencyWindowTest, WhatIsAcknowledgedHasBeenReceived) {
  const LowLatencyCase one = make_low_latency_case({.tokens = {2, 3}, .max_tokens = 6, .hidden = 256, .topk = 2});
  on_two_ranks([&](Rank& rank, Buffer& buffer) {
    const auto send = [&] { return buffer.low_latency_dispatch(with_hook(upload_arguments(rank, one)), rank.call()); };
    const std::vector<LowLatencyDispatchResult> results = {send(), send()};
    for (std::uint64_t received = 0; received < results.size(); ++received) {
      if (rank.rank() == 1) results[received].hook();
      rank.executor()->synchronize(rank.stream());
      rank.bootstrap()->barrier();
      constexpr int kWord = LowLatencyMailbox::kAcknowledged;
      const std::uint64_t told = *window().word(LowLatencyKind::dispatch, 1, kWord).in(heap_of(buffer));
      require(rank.rank() == 1 || told == received, "acknowledged: call " + std::to_string(told));
      rank.bootstrap()->barrier();
    }
  });
}

}  // namespace
}  // namespace deep_ep::test
