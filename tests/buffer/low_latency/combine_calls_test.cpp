// Statistics of low-latency calls, and bad arguments of combine.
#include <chrono>
#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyCombineCallsTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyCombineCallsTest);

TEST_P(LowLatencyCombineCallsTest, StatisticsTellWhoWasLate) {
  const LowLatencyCombineCase one = make_low_latency_combine_case(
      {.tokens = {4, 4}, .max_tokens = 4, .hidden = 128, .local_experts = 1, .topk = 2});  // all tokens go everywhere
  for (const bool hooks : {false, true})
    run_with_buffers(cluster(2), low_latency_options(2, 4, 128), [&](Rank& rank, Buffer& buffer) {
      const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
      const auto be_late = [&](auto arguments, const auto& make_call) {
        constexpr std::int64_t kBefore = std::int64_t{1} << 60;
        // Rank 1 calls `late` s after rank 0 has. On a busy machine rank 0's kernel may not wait by then: once more,
        // later.
        for (double late = 0.1;; late *= 2) {
          arguments.wait_recv_cost_stats = rank.upload(std::vector(2, kBefore), DType::int64, {2});
          if (rank.rank() == 0) make_call(with_hook(arguments, hooks));
          rank.bootstrap()->barrier();
          if (rank.rank() == 1) {
            std::this_thread::sleep_for(std::chrono::duration<double>(late));
            make_call(with_hook(arguments, hooks));
          }
          const auto cost = rank.download<std::int64_t>(*arguments.wait_recv_cost_stats);
          if (all_gather_values(*rank.bootstrap(), cost[1])[0] - kBefore > 20'000'000) break;
          require(late < patience() / 4, "rank 1 was late, cost " + std::to_string(cost[1] - kBefore));
        }
        const auto cost = rank.download<std::int64_t>(*arguments.wait_recv_cost_stats);
        make_call(with_hook(arguments, hooks));
        const auto sum = rank.download<std::int64_t>(*arguments.wait_recv_cost_stats);
        for (const int source : {0, 1}) {
          require(cost[source] >= kBefore && sum[source] >= cost[source], "costs are added");
          require(sum[source] - kBefore < std::int64_t{1} << 50, "cost " + std::to_string(sum[source] - kBefore));
        }
        rank.bootstrap()->barrier();
      };
      be_late(upload_arguments(rank, one.before),
              [&](const auto& call) { received(buffer.low_latency_dispatch(call, rank.call())); });
      be_late(upload_combine(rank, one, handle),
              [&](const auto& call) { received(buffer.low_latency_combine(call, rank.call())); });
    });
}

TEST_P(LowLatencyCombineCallsTest, Arguments) {
  const LowLatencyCombineCase one =
      make_low_latency_combine_case({.tokens = {3, 5}, .max_tokens = 7, .hidden = 256, .topk = 3});
  run_with_buffers(cluster(2), low_latency_options(2, 7, 256), [&](Rank& rank, Buffer& buffer) {
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
    const LowLatencyCombineArguments good = upload_combine(rank, one, handle);
    CallOptions call = rank.call();
    const auto refused = [&](const std::vector<std::string>& words, auto change) {
      LowLatencyCombineArguments bad = good;
      LowLatencyHandle bad_handle = handle;
      bad.handle = &bad_handle;
      change(bad, bad_handle);
      require_throws<InvalidArgument>([&] { buffer.low_latency_combine(bad, call); }, words, words.front());
    };
    using A = LowLatencyCombineArguments;
    using H = LowLatencyHandle;
    call.async_finish = true;
    refused({"async_finish", "return_recv_hook"}, [](A& a, H&) { a.return_recv_hook = true; });
    call.async_finish = false;
    refused({"handle", "low_latency_dispatch"}, [](A&, H& h) { h = {}; });
    refused({"handle.num_experts", "2 ranks"}, [](A&, H& h) { h.num_experts = 3; });
    refused({"handle.row_table"}, [](A&, H& h) { h.num_topk = 2; });
    refused({"x", "[3, 14, any]"}, [](A& a, H&) { a.x.shape[1] = 13; });
    refused({"hidden", "128"}, [](A& a, H&) { a.x.shape[2] = a.x.strides[1] = 64, a.x.strides[0] = 14 * 64; });
    refused({"topk_idx has 0 rows", "tokens"}, [](A& a, H&) { a.topk_idx.shape[0] = 0; });
    refused({"out", "bfloat16"}, [](A& a, H&) { a.out = writable(a.topk_weights); });
    refused({"wait_recv_cost_stats", "[2]"}, [](A& a, H&) { a.wait_recv_cost_stats = writable(a.topk_idx); });
    refused({"num_sms"}, [](A& a, H&) { a.num_sms = -1; });
    check_low_latency_combine(rank, one, one.expected(), buffer.low_latency_combine(good, call).combined_x.view());
  });
}

}  // namespace
}  // namespace deep_ep::test
