// A Buffer call asks the executor for things, which costs the host time. These tests limit how many requests a call
// makes once everything is warm, so that they do not grow unnoticed.
#include <gtest/gtest.h>

#include "csrc/memory/storage.hpp"
#include "deep_ep/bootstrap.hpp"
#include "tests/cluster/case.hpp"
#include "tests/cluster/counting_executor.hpp"
#include "tests/cluster/exchange.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

/// A buffer with a single rank: the number of requests does not depend on the number of ranks.
class HostCallsTest : public ::testing::Test {
 protected:
  /// Requests for one call of `action` and for dropping what it returns, after some calls to warm up.
  template <class Action>
  ExecutorCalls count(Action&& action) {
    constexpr int kWarmUp = 3;
    constexpr int kCalls = 4;
    for (int i = 0; i < kWarmUp; ++i) action();
    rank_.executor()->synchronize(rank_.stream());
    executor_->calls = {};
    for (int i = 0; i < kCalls; ++i) action();
    const ExecutorCalls all = executor_->calls;
    rank_.executor()->synchronize(rank_.stream());
    return {all.all / kCalls, all.record_event / kCalls, all.wait_event / kCalls};
  }

  std::shared_ptr<Bootstrap> bootstrap_ = make_thread_bootstraps(1).front();
  std::shared_ptr<CountingExecutor> executor_ = std::make_shared<CountingExecutor>(make_host_executor());
  Rank rank_{0, {.ranks = 1}, bootstrap_, executor_};
  Case case_ = make_case({.tokens = {40}, .hidden = 64, .combine_hidden = 64});
};

// A call needs six: current device, an event there and back, is it recorded? Each piece of memory needs three more over
// its life: is the caller's stream recording, an event behind its last use there, a wait for it at the next use.
constexpr int pieces(int count) { return 6 + 3 * count; }

TEST_F(HostCallsTest, StayFew) {
  if (!MemoryCache::kReuses) GTEST_SKIP() << "under AddressSanitizer every call allocates";
  Buffer& buffer = rank_.buffer();
  Inputs inputs = upload_inputs(rank_, case_);
  const int experts = case_.shape.experts();

  const ExecutorCalls layout = count([&] { buffer.get_dispatch_layout(inputs.topk_idx, experts, rank_.call()); });
  const ExecutorCalls dispatch = count([&] { buffer.dispatch(inputs.dispatch, rank_.call()); });
  const DispatchResult original = buffer.dispatch(inputs.dispatch, rank_.call());
  DispatchArguments cached_arguments;
  cached_arguments.x = inputs.dispatch.x;
  cached_arguments.handle = &original.handle;
  const ExecutorCalls cached = count([&] { buffer.dispatch(cached_arguments, rank_.call()); });
  Returned returned = upload_returned(rank_, buffer, case_, original.handle, true);
  const ExecutorCalls combine = count([&] { buffer.combine(returned.combine, rank_.call()); });

  EXPECT_LE(layout.all, pieces(1));
  EXPECT_LE(dispatch.all, pieces(4)) << "tables of the handle, its source indices, rows, what comes with the rows";
  EXPECT_LE(cached.all, pieces(1));
  EXPECT_LE(combine.all, pieces(2)) << "tokens and weights";
}

TEST_F(HostCallsTest, LowLatencyCallsStayFew) {
  if (!MemoryCache::kReuses) GTEST_SKIP() << "under AddressSanitizer every call allocates";
  const auto one = make_low_latency_combine_case({.tokens = {4}, .max_tokens = 4, .hidden = 256, .topk = 2});
  Buffer& buffer = rank_.buffer(low_latency_options(1, 4, 256));
  const LowLatencyDispatchArguments to_dispatch = upload_arguments(rank_, one.before);
  const LowLatencyHandle handle = dispatch_low_latency(rank_, buffer, one);
  const LowLatencyCombineArguments to_combine = upload_combine(rank_, one, handle);

  const ExecutorCalls dispatch = count([&] { buffer.low_latency_dispatch(to_dispatch, rank_.call()); });
  const ExecutorCalls combine = count([&] { buffer.low_latency_combine(to_combine, rank_.call()); });
  EXPECT_LE(dispatch.all, pieces(2)) << "rows, and what comes with them";
  EXPECT_LE(combine.all, pieces(1));

  // The default stream orders its calls by itself.
  LowLatencyCombineArguments into = to_combine;
  const LowLatencyCombineResult earlier = buffer.low_latency_combine(to_combine, {});
  into.out = earlier.combined_x.view();
  const ExecutorCalls bare = count([&] { buffer.low_latency_combine(into, {}); });
  EXPECT_EQ(bare.wait_event, 0);
}

}  // namespace
}  // namespace deep_ep::test
