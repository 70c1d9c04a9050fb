// Calls that fail on the way, at each request to the executor: afterwards the buffer is as if they had ended.
#include <gtest/gtest.h>

#include <optional>
#include <source_location>

#include "deep_ep/bootstrap.hpp"
#include "tests/cluster/case.hpp"
#include "tests/cluster/exchange.hpp"
#include "tests/cluster/low_latency_case.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"
#include "tests/cluster/recording_executor.hpp"

namespace deep_ep::test {
namespace {

/// A buffer with a single rank, so that nobody waits for the rest of a call that failed.
class FailedCallsTest : public ::testing::Test {
 protected:
  FailedCallsTest() {
    BufferOptions options = low_latency_options(1, 8, 512);
    options.heap_bytes = std::size_t{64} << 20;
    options.low_latency.masking = true;
    buffer_ = &rank_.buffer(options);
  }

  /// Lets the first request of `call` fail, then the second, ... until it succeeds.
  template <class Call>
  void fails_everywhere(Call&& call, std::source_location where = std::source_location::current()) {
    int failures = 0;
    for (bool failed = true; failed; failures += failed) {
      auto earlier = buffer_->get_dispatch_layout(inputs_.topk_idx, case_.shape.experts(), rank_.call());
      executor_->refused_request = failures + 1;
      failed = false;
      try {
        [[maybe_unused]] const auto result = call();
        executor_->refused_request = 0;  // what is returned may be dropped
      } catch (const Refused&) {
        failed = true;
      }
      ASSERT_EQ(executor_->refused_request, 0);
      const ::testing::ScopedTrace trace(where.file_name(), int(where.line()),
                                         "request " + std::to_string(failures + 1));
      executor_->calls = {};
      earlier = {};
      EXPECT_EQ(executor_->calls.record_event, 1) << "given back behind the work of the stream that it was given to";
      for (const StreamHandle stream : {rank_.stream(), buffer_->comm_stream()}) executor_->synchronize(stream);
      if (HasFailure()) return;
    }
    EXPECT_GT(failures, 2) << "the call asks the executor for more than that";
    buffer_->check();
    run_round(rank_, *buffer_, case_);
  }

  /// The counts of calls of both parts agree: rows come, and nobody has been masked meanwhile.
  void expect_next_low_latency_dispatch() {
    const auto result = buffer_->low_latency_dispatch(upload_arguments(rank_, low_latency_.before), rank_.call());
    check_low_latency_dispatch(rank_, low_latency_.before, result);
    EXPECT_EQ(query_masks(rank_, *buffer_), std::vector<std::int32_t>{0});
  }

  std::shared_ptr<Bootstrap> bootstrap_ = make_thread_bootstraps(1).front();
  std::shared_ptr<RecordingExecutor> executor_ = std::make_shared<RecordingExecutor>(make_host_executor());
  Rank rank_{0, {.ranks = 1}, bootstrap_, executor_};
  Case case_ = make_case({.tokens = {9}, .hidden = 64, .combine_hidden = 64});
  Inputs inputs_ = upload_inputs(rank_, case_);
  LowLatencyCombineCase low_latency_ =
      make_low_latency_combine_case({.tokens = {3}, .max_tokens = 4, .hidden = 256, .topk = 2});
  Buffer* buffer_ = nullptr;
};

TEST_F(FailedCallsTest, OneAfterTheOther) {
  const CallOptions call = rank_.call();
  CallOptions on_the_communication_stream = call;
  on_the_communication_stream.async_finish = true;
  for (const CallOptions& how : {call, on_the_communication_stream}) {
    fails_everywhere([&] { return buffer_->get_dispatch_layout(inputs_.topk_idx, case_.shape.experts(), how); });
  }
  fails_everywhere([&] { return buffer_->dispatch(inputs_.dispatch, call); });
  fails_everywhere([&] { return buffer_->allocate_tensor(DType::uint8, {100}, call.stream); });
  const LowLatencyDispatchArguments dispatch = upload_arguments(rank_, low_latency_.before);
  fails_everywhere([&] { return buffer_->low_latency_dispatch(dispatch, call); });
  const LowLatencyHandle handle = dispatch_low_latency(rank_, *buffer_, low_latency_);
  const LowLatencyCombineArguments combine = upload_combine(rank_, low_latency_, handle);
  fails_everywhere([&] { return buffer_->low_latency_combine(combine, call); });
  fails_everywhere([&] { return buffer_->low_latency_clean(call.stream), 0; });
  const TensorView status = rank_.upload(std::vector<std::int32_t>(1), DType::int32, {1});
  fails_everywhere([&] { return buffer_->low_latency_query_mask(status, call.stream), 0; });
  fails_everywhere([&] { return buffer_->low_latency_update_mask(0, false, call.stream), 0; });
  fails_everywhere([&] { return buffer_->low_latency_clear_mask(call.stream), 0; });
}

TEST_F(FailedCallsTest, Hook) {
  const LowLatencyDispatchResult sent =
      buffer_->low_latency_dispatch(with_hook(upload_arguments(rank_, low_latency_.before)), rank_.call());
  fails_everywhere([&] { return sent.hook(), 0; });
  check_low_latency_dispatch(rank_, low_latency_.before, sent);
  expect_next_low_latency_dispatch();
}

/// Its rows are sent, so they must be received, too; and nothing is left behind in the queue of hooks.
TEST_F(FailedCallsTest, LowLatencyDispatchWithHook) {
  const LowLatencyDispatchArguments arguments = with_hook(upload_arguments(rank_, low_latency_.before));
  std::optional<LowLatencyDispatchResult> sent;
  fails_everywhere([&] {
    CallOptions call = rank_.call();
    call.previous_event = executor_->record_event(call.stream);  // so that the call has more to do at its end
    sent = buffer_->low_latency_dispatch(arguments, call);
    return 0;
  });
  const auto second = buffer_->low_latency_dispatch(arguments, rank_.call());
  second.hook();
  for (const auto& result : {*sent, second}) check_low_latency_dispatch(rank_, low_latency_.before, result);
  expect_next_low_latency_dispatch();
}

/// Of what a recording cannot hold, nothing is left in it.
TEST_F(FailedCallsTest, RecordedCalls) {
  const CallOptions call = rank_.call();
  record(rank_, *executor_, [&] {
    require_throws<InvalidArgument>([&] { buffer_->dispatch(inputs_.dispatch, call); },
                                    {"num_worst_tokens is 0, but the stream records a CUDA graph"}, "exact sizes");
    require_throws<InvalidArgument>([&] { buffer_->allocate_tensor(DType::uint8, {100}, call.stream); },
                                    {"allocate_tensor: the stream is being recorded into a CUDA graph"}, "the heap");
  });
  buffer_->check();
  run_round(rank_, *buffer_, case_);
}

}  // namespace
}  // namespace deep_ep::test
