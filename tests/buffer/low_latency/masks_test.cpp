// How low-latency calls react to bad arguments, and to ranks that do not come.
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/cluster/counting_executor.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyMasksTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyMasksTest);
/// Tests of lost ranks that do not depend on how ranks reach each other.
class LowLatencyLostRanksTest : public ClusterTest {};
DEEP_EP_ON_THREADS(LowLatencyLostRanksTest);

LowLatencyCase four_ranks(std::uint64_t seed) {
  return make_low_latency_case(
      {.tokens = {5, 4, 6, 3}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3, .seed = seed});
}

BufferOptions masking_options(double timeout_s) { return low_latency_options(4, 6, 256, timeout_s, true); }

TEST_P(LowLatencyMasksTest, MaskedByHand) {
  const LowLatencyCase all = four_ranks(1);
  // Ranks 1 and the others leave each other out.
  oracle::Masks masks = masks_without(4, 1);
  for (const std::size_t other : {0u, 2u, 3u}) masks[4 + other] = 1;
  const LowLatencyCombineCase combined = make_low_latency_combine_case(all.shape);
  LowLatencyCombineCase combined_apart = combined;
  combined_apart.options.masks = masks;
  std::vector<LowLatencyCase> apart;
  for (const auto format : {all.shape.format, oracle::RowFormat::nvfp4}) {
    LowLatencyCase one = all;
    one.shape.format = format;
    apart.push_back(with_masks(one, masks));
  }
  run_with_buffers(cluster(4), masking_options(patience()), [&](Rank& rank, Buffer& buffer) {
    dispatch_and_check(rank, buffer, all);
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, combined);
    const auto combine_and_check = [&](const LowLatencyCombineCase& expected) {
      const auto result = buffer.low_latency_combine(upload_combine(rank, combined, handle), rank.call());
      check_low_latency_combine(rank, combined, expected.expected(ranks_per_node_of(GetParam().topology, 4)),
                                result.combined_x.view());
    };
    for (int i = 0; i < 2; ++i) combine_and_check(combined);  // leaves rows in both halves of the window
    require_same({0, 0, 0, 0}, query_masks(rank, buffer), "nobody is masked");
    std::vector<std::int32_t> expected(4, 0);
    for (int other = 0; other < 4; ++other) {
      if ((rank.rank() == 1) == (other == 1)) continue;
      buffer.low_latency_update_mask(other, true, rank.call().stream);
      expected[static_cast<std::size_t>(other)] = 1;
    }
    require_same(expected, query_masks(rank, buffer), "masks");
    for (const LowLatencyCase& one : apart) {
      dispatch_and_check(rank, buffer, one);
      combine_and_check(combined_apart);
    }
    buffer.low_latency_clean(rank.call().stream);
    // Everybody made the same number of calls: unmasking is enough.
    if (rank.rank() % 2 == 0) {
      buffer.low_latency_clear_mask(rank.call().stream);
    } else {
      for (int other = 0; other < 4; ++other) buffer.low_latency_update_mask(other, false, rank.call().stream);
    }
    require_same({0, 0, 0, 0}, query_masks(rank, buffer), "unmasked");
    for (int i = 0; i < 3; ++i) dispatch_and_check(rank, buffer, all);
    combine_and_check(combined);
    buffer.check();
  });
}

TEST_P(LowLatencyMasksTest, ARankThatDoesNotComeIsMaskedAndMayComeBack) {
  const LowLatencyCase all = four_ranks(2);
  const LowLatencyCase without = with_masks(all, masks_without(4, 3));
  run_with_buffers(cluster_with_absentees(4), masking_options(short_deadline()), [&](Rank& rank, Buffer& buffer) {
    for (int i = 0; i < 3; ++i) dispatch_and_check(rank, buffer, all);
    if (rank.rank() != 3) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < 5; ++i) {
        dispatch_and_check(rank, buffer, without);
        require_same({0, 0, 0, 1}, query_masks(rank, buffer), "masked after the deadline");
      }
      buffer.low_latency_clean(rank.call().stream);
      rank.executor()->synchronize(rank.stream());
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      require(took.count() < 3 * short_deadline(), "the deadline is paid once, not in every call");
    }
    buffer.low_latency_resume();
    buffer.low_latency_clean(rank.call().stream);  // of which rank 3 has missed one
    require_same({0, 0, 0, 0}, query_masks(rank, buffer), "unmasked");
    for (int i = 0; i < 3; ++i) dispatch_and_check(rank, buffer, all);
    buffer.check();
  });
}

/// The others do not wait for the rank where it fails. All go on as before, a hook that waits included, and may try
/// again.
TEST_P(LowLatencyMasksTest, AResumeThatFailsOnOneRankFailsOnAll) {
  const LowLatencyCase all = four_ranks(9);
  run_cluster(cluster(4), [&](Rank& rank) {
    const auto executor = std::make_shared<CountingExecutor>(rank.executor());
    Buffer buffer(rank.bootstrap(), executor, masking_options(patience()));
    const auto resume = [&] { buffer.low_latency_resume(); };
    const auto sent = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, all)), rank.call());
    if (rank.rank() == 1) {
      executor->refused_request = 1;
      require_throws<Refused>(resume, {"this request is refused"}, "its own error");
    } else {
      require_throws<SystemError>(resume, {"low_latency_resume failed on rank 1: this request is refused"}, "others");
    }
    sent.hook();
    check_low_latency_dispatch(rank, all, sent);
    resume();
    for (int i = 0; i < 3; ++i) dispatch_and_check(rank, buffer, all);
    buffer.check();
    buffer.destroy();
  });
}

/// The others have left by themselves when the lost rank comes to its end, and none waits in the bootstrap.
TEST_P(LowLatencyLostRanksTest, TheEndWaitsForNobodyWhoIsLost) {
  const LowLatencyCase all = four_ranks(7);
  const LowLatencyCase without = with_masks(all, masks_without(4, 3));
  run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(masking_options(short_deadline()));
    dispatch_and_check(rank, buffer, all);
    if (rank.rank() != 3) {
      dispatch_and_check(rank, buffer, without);
      buffer.destroy();
      rank.bootstrap()->barrier();
    } else {
      rank.bootstrap()->barrier();
      buffer.destroy();
    }
  });
}

/// A rank that waits at the end of the buffer keeps nobody from coming there, too.
TEST_P(LowLatencyLostRanksTest, TheEndWaitsForARankThatComesLater) {
  std::atomic<bool> comes{false};
  run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(masking_options(patience()));
    if (rank.rank() == 3) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // less of it would only hide a mistake
      comes = true;
    }
    buffer.destroy();
    require(comes, "rank 3 has come");
  });
}

/// No call is under way, so no verdict says that it is lost.
TEST_P(LowLatencyLostRanksTest, TheEndDoesNotWaitForEverForARankThatDoesNotCome) {
  run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(masking_options(short_deadline()));
    if (rank.rank() == 3) rank.bootstrap()->barrier();
    buffer.destroy();
    if (rank.rank() != 3) rank.bootstrap()->barrier();
  });
}

/// It waits for ranks that do not know of its calls, so its waits say nothing against them. Nothing is selected, so it
/// waits for nothing but that all have begun.
TEST_P(LowLatencyLostRanksTest, ARankThatTheProgramMasksAccusesNobody) {
  const LowLatencyCase all = four_ranks(10);
  run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(masking_options(scaled(0.5)));
    LowLatencyDispatchArguments dispatch = upload_arguments(rank, all);
    const std::vector<std::int64_t> nothing(static_cast<std::size_t>(dispatch.topk_idx.elements()), -1);
    dispatch.topk_idx = rank.upload(nothing, DType::int64, {dispatch.topk_idx.size(0), 3});
    const LowLatencyHandle handle = buffer.low_latency_dispatch(dispatch, rank.call()).handle;
    if (rank.rank() != 3) buffer.low_latency_update_mask(3, true, rank.call().stream);
    rank.bootstrap()->barrier();
    if (rank.rank() == 3) {
      buffer.low_latency_combine(combine_anything(rank, handle, dispatch.topk_idx, 3), rank.call());
      require_throws<TimeoutError>([&] { buffer.check(); },
                                   {"rank 3 waited", "low-latency combine", "signal at an earlier call, expected 1)"},
                                   "after eight time-outs");
    }
    rank.bootstrap()->barrier();
    if (rank.rank() == 3) return;
    require_same({0, 0, 0, 1}, query_masks(rank, buffer), "masks");
    buffer.check();
  });
}

/// It used to mask all others: they no longer send it anything.
TEST_P(LowLatencyLostRanksTest, AMaskedRankThatComesLateIsToldAndMasksNobody) {
  const LowLatencyCase all = four_ranks(6);
  const LowLatencyCase without = with_masks(all, masks_without(4, 3));
  run_with_buffers(cluster_with_absentees(4), masking_options(short_deadline()), [&](Rank& rank, Buffer& buffer) {
    dispatch_and_check(rank, buffer, all);
    for (int i = 0; i < 2 && rank.rank() != 3; ++i) dispatch_and_check(rank, buffer, without);
    rank.bootstrap()->barrier();
    if (rank.rank() == 3) {
      // The others may be here before this one has heard of it; what they sent before may be there, so no call waits.
      const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience());
      while (buffer.lost_ranks().empty() && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const auto call = [&] {
        buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call());
        buffer.check();
      };
      require_throws<TimeoutError>(call, {"rank 3 is masked", "low_latency_resume"}, "it is told");
      require_same({0, 0, 0, 0}, query_masks(rank, buffer), "it masks nobody");
      require_throws<TimeoutError>(call, {"low_latency_resume"}, "every later call");
      require_throws<TimeoutError>([&] { buffer.low_latency_clear_mask(rank.call().stream); }, {"low_latency_resume"},
                                   "it cannot come back by itself");
    }
    buffer.low_latency_resume();
    require_same({0, 0, 0, 0}, query_masks(rank, buffer), "unmasked");
    for (int i = 0; i < 3; ++i) dispatch_and_check(rank, buffer, all);
    buffer.check();
  });
}

TEST_P(LowLatencyMasksTest, ABarrierHoldsEverybody) {
  run_with_buffers(cluster(2), low_latency_options(2, 4, 128), [&](Rank& rank, Buffer& buffer) {
    Executor& executor = *rank.executor();
    if (rank.rank() == 0) {
      buffer.low_latency_clean(rank.call().stream);
      const EventHandle passed = executor.record_event(rank.stream());
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // less of it would only hide a mistake
      require(!executor.event_done(passed), "rank 1 has not come yet");
    }
    rank.bootstrap()->barrier();
    if (rank.rank() == 1) buffer.low_latency_clean(rank.call().stream);
    buffer.check();
  });
}

TEST_P(LowLatencyMasksTest, Arguments) {
  const LowLatencyCase one =
      make_low_latency_case({.tokens = {3, 2}, .max_tokens = 4, .hidden = 256, .local_experts = 2, .topk = 2});
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(2, 4, 256));
    const LowLatencyDispatchArguments good = upload_arguments(rank, one);
    CallOptions call = rank.call();
    const auto refused = [&](const std::vector<std::string>& words, auto change) {
      LowLatencyDispatchArguments bad = good;
      change(bad);
      require_throws<InvalidArgument>([&] { buffer.low_latency_dispatch(bad, call); }, words, words.front());
    };
    call.async_finish = true;
    refused({"async_finish", "return_recv_hook"}, [](auto& a) { a.return_recv_hook = true; });
    call.async_finish = false;
    refused({"arrival_rows is 4", "arrival_counters"}, [](auto& a) { a.arrival_rows = 4; });
    refused({"hidden", "512"}, [](auto& a) { a.format = LowLatencyFormat::fp8_ue8m0; });
    refused({"rows of x", "1"}, [](auto& a) { a.max_tokens = 1; });
    refused({"max_tokens", "low_latency.bytes"}, [](auto& a) { a.max_tokens = 30000; });
    refused({"num_experts", "3"}, [](auto& a) { a.num_experts = 3; });
    refused({"wait_recv_cost_stats"}, [](auto& a) { a.wait_recv_cost_stats = writable(a.x); });
    require_throws<InvalidArgument>([&] { buffer.low_latency_clear_mask(rank.call().stream); }, {"low_latency.masking"},
                                    "masks without masking");
    check_low_latency_dispatch(rank, one, buffer.low_latency_dispatch(good, rank.call()));
    buffer.destroy();

    Buffer& normal = rank.buffer({.heap_bytes = std::size_t{4} << 20});
    require_throws<InvalidArgument>([&] { normal.low_latency_dispatch(good, rank.call()); },
                                    {"low_latency_dispatch", "low_latency.bytes"}, "a buffer without memory for it");
    normal.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
