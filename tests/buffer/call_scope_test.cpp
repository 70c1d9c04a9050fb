#include "csrc/buffer/call_scope.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "csrc/executor/own_stream.hpp"
#include "deep_ep/error.hpp"
#include "tests/memory/fake_executor.hpp"

namespace deep_ep {
namespace {

using test::FakeExecutor;

class CallScopeTest : public ::testing::Test {
 protected:
  static FakeExecutor::Stream& state(StreamHandle stream) { return FakeExecutor::of(stream); }
  /// Has `stream` been made to wait for work of `other`?
  static bool waits_for(StreamHandle stream, StreamHandle other) { return waits(stream, other) != 0; }
  static std::ptrdiff_t waits(StreamHandle stream, StreamHandle other) {
    return std::ranges::count_if(state(stream).waited_for, [&](const EventHandle& event) {
      return FakeExecutor::stream_of(event) == &state(other);
    });
  }
  TimeoutError settle_in_vain(double seconds = 0.01) {
    context_.settle_s = seconds;
    try {
      context_.settle();
    } catch (const TimeoutError& error) {
      return error;
    }
    ADD_FAILURE() << "the work has ended";
    return TimeoutError("");
  }
  std::shared_ptr<FakeExecutor> executor_ = std::make_shared<FakeExecutor>();
  OwnStream streams_[3] = {OwnStream(*executor_), OwnStream(*executor_), OwnStream(*executor_)};
  StreamHandle caller_ = streams_[0].get(), side_ = streams_[1].get(), comm_ = streams_[2].get();
  CallContext context_{executor_, comm_, std::make_shared<Arena>(executor_, test::fake_memory(), 1 << 20)};
  TensorView wanted_ = unplaced({}, DType::uint8, {100});
};

TEST_F(CallScopeTest, RunsInPlaceWhereTheCallerWaitsAnyway) {
  CallScope scope(context_, {.stream = caller_});
  EXPECT_EQ(scope.stream(), caller_);
  EXPECT_FALSE(scope.recording());
  EXPECT_EQ(scope.finish(), nullptr);
  EXPECT_TRUE(state(caller_).waited_for.empty()) << "there is no other stream, and no earlier call";
}

TEST_F(CallScopeTest, AsyncCallsRunOnTheCommunicationStreamBehindTheCaller) {
  CallScope scope(context_, {.stream = caller_, .async_finish = true});
  EXPECT_EQ(scope.stream(), comm_);
  EXPECT_TRUE(waits_for(comm_, caller_));
  const EventHandle done = scope.finish();
  ASSERT_NE(done, nullptr);
  EXPECT_EQ(FakeExecutor::stream_of(done), &state(comm_));
  EXPECT_FALSE(waits_for(caller_, comm_));
}

TEST_F(CallScopeTest, APreviousEventStandsForTheCallersStream) {
  const EventHandle previous = executor_->record_event(side_);
  CallScope scope(context_, {.stream = caller_, .previous_event = previous});
  EXPECT_EQ(scope.stream(), comm_);
  EXPECT_TRUE(waits_for(comm_, side_));
  EXPECT_FALSE(waits_for(comm_, caller_));
  EXPECT_EQ(scope.finish(), nullptr);
  EXPECT_TRUE(waits_for(caller_, comm_));
}

TEST_F(CallScopeTest, AnotherEventComesFirstInAnyCase) {
  for (const EventHandle& previous : {EventHandle{}, executor_->record_event(caller_)}) {
    state(comm_).waited_for.clear();
    const EventHandle also = executor_->record_event(side_);
    CallScope scope(context_,
                    {.stream = caller_, .previous_event = previous, .async_finish = true, .also_after = also});
    EXPECT_TRUE(waits_for(comm_, side_));
    EXPECT_TRUE(waits_for(comm_, caller_)) << "or its event";
    scope.finish();
  }
  CallScope scope(context_, {.stream = caller_, .also_after = executor_->record_event(side_)});
  EXPECT_EQ(scope.stream(), caller_);
  EXPECT_TRUE(waits_for(caller_, side_));
}

TEST_F(CallScopeTest, EachCallComesAfterTheOneBefore) {
  CallScope(context_, {.stream = side_}).finish();
  CallScope(context_, {.stream = caller_}).finish();
  EXPECT_TRUE(waits_for(caller_, side_));
}

TEST_F(CallScopeTest, AnAbandonedCallIsWaitedForLikeAnyOther) {
  { CallScope scope(context_, {.stream = side_}); }
  CallScope(context_, {.stream = caller_}).finish();
  EXPECT_TRUE(waits_for(caller_, side_));
}

TEST_F(CallScopeTest, AskedForNoEventACallOnTheDefaultStreamHasNoneUntilACallLeavesIt) {
  FakeExecutor::Stream& of_all = FakeExecutor::of(nullptr);
  CallScope(context_, {}).finish();
  const std::uint64_t before = of_all.enqueued;
  CallScope(context_, {.stream = caller_}).finish();
  EXPECT_EQ(of_all.enqueued, before);  // it waits for the call, and for nothing behind it
  EXPECT_EQ(waits(caller_, nullptr), 1);
  const auto call_without = [&](bool finishes) {
    CallScope scope(context_, {}, false);
    if (finishes) scope.finish();
  };
  call_without(true);
  call_without(false);
  EXPECT_EQ(of_all.enqueued, before);
  CallScope(context_, {.stream = caller_}).finish();
  EXPECT_EQ(waits(caller_, nullptr), 2);
  EXPECT_EQ(of_all.enqueued, before + 1);  // the event that the call waits for
  call_without(true);
  settle_in_vain();
  EXPECT_EQ(waits(comm_, nullptr), 1);
}

/// The work of this executor ends when the test says so.
TEST_F(CallScopeTest, WorkThatDoesNotEndIsWaitedForOnceAndThenForASecond) {
  settle_in_vain();
  EXPECT_EQ(context_.settle_s, 1) << "destroy comes behind an error";
  const TimeoutError error = settle_in_vain();
  EXPECT_TRUE(std::string(error.what()).starts_with("the work of this rank has not ended within 0.01 s"))
      << error.what();
}

/// From the first kernel that other ranks hear of to the end of the scope a failure ends the buffer.
TEST_F(CallScopeTest, ACallThatFailsAfterItBeginsIsReported) {
  std::uint64_t calls = 0;
  int failures = 0;
  context_.num_calls = &calls;
  context_.end_begun_call = [&] { ++failures; };
  const auto call = [&](bool begins, bool fails) {
    try {
      CallScope scope(context_, {.stream = caller_});
      if (begins) scope.begins();
      if (begins) scope.begins();  // a call may have several kernels
      if (fails) throw OutOfMemory("no memory for results");
      scope.finish();
    } catch (const OutOfMemory&) {
    }
    return std::pair(calls, failures);
  };
  EXPECT_EQ(call(false, true), std::pair(std::uint64_t{0}, 0)) << "refused: it may be made again";
  EXPECT_EQ(call(true, false), std::pair(std::uint64_t{1}, 0));
  EXPECT_EQ(call(true, true), std::pair(std::uint64_t{2}, 1));
  CallScope scope(context_, {.stream = caller_});
  scope.begins();
  state(caller_).gone = state(comm_).gone = true;
  EXPECT_THROW(scope.finish(), SystemError);
  EXPECT_EQ(failures, 1) << "all is enqueued that others wait for";
}

TEST_F(CallScopeTest, RecordedCallsGetNoMemoryOfTheHeap) {
  for (const bool recorded : {true, false}) {
    state(caller_).capturing = state(comm_).capturing = recorded;
    CallScope scope(context_, {.stream = caller_});
    EXPECT_EQ(scope.tensors({&wanted_, 1}, true).empty(), recorded);
    scope.finish();
  }
}

TEST_F(CallScopeTest, RecordedCallsAreOrderedByTheGraphAlone) {
  CallScope(context_, {.stream = side_}).finish();
  state(caller_).capturing = state(comm_).capturing = true;
  CallScope scope(context_, {.stream = caller_});
  EXPECT_TRUE(scope.recording());
  EXPECT_EQ(scope.stream(), comm_);
  EXPECT_FALSE(waits_for(comm_, side_));
  scope.finish();
  EXPECT_TRUE(waits_for(caller_, comm_));
  state(caller_).capturing = state(comm_).capturing = false;
  CallScope next(context_, {.stream = side_});
  EXPECT_FALSE(waits_for(side_, comm_)) << "what is recorded does not run now";
}

TEST_F(CallScopeTest, ARecordedCallThatIsAbandonedLeavesNoForkBehind) {
  for (const bool async_finish : {false, true}) {
    state(caller_).capturing = state(comm_).capturing = true;
    state(caller_).waited_for.clear();
    { CallScope scope(context_, {.stream = caller_, .async_finish = async_finish}); }
    EXPECT_TRUE(waits_for(caller_, comm_)) << "the end of the recording needs all its streams joined";
    state(caller_).capturing = state(comm_).capturing = false;
  }
}

TEST_F(CallScopeTest, MemoryIsGivenBackBehindTheStreamItWasHandedTo) {
  std::optional<Tensor> tensor;
  {
    CallScope scope(context_, {.stream = side_, .async_finish = true});
    tensor = scope.pool_tensor(wanted_);
    scope.hand_out({&*tensor});
    scope.finish();
  }
  state(comm_).waited_for.clear();
  tensor.reset();
  CallScope scope(context_, {.stream = caller_, .async_finish = true});
  const Tensor next = scope.pool_tensor(wanted_);
  EXPECT_TRUE(waits_for(comm_, side_)) << "the next user comes after the work of that stream";
}

TEST_F(CallScopeTest, MemoryOfACallInPlaceIsGivenBackBehindWhatTheCallerDidWithIt) {
  std::optional<Tensor> tensor;
  {
    CallScope scope(context_, {.stream = side_});
    tensor = scope.pool_tensor(wanted_);
    scope.hand_out({&*tensor});
    scope.finish();
  }
  tensor.reset();  // when the caller's stream has used it
  CallScope scope(context_, {.stream = caller_, .async_finish = true});
  const Tensor next = scope.pool_tensor(wanted_);
  EXPECT_EQ(waits(comm_, side_), 2) << "for the end of the call, and for what the caller did with the memory";
}

TEST_F(CallScopeTest, MemoryIsGivenBackBehindWhatTheCallerDidOnTheCommunicationStream) {
  if (!MemoryCache::kReuses) GTEST_SKIP() << "nothing is kept under AddressSanitizer";
  std::optional<Tensor> tensor;
  {
    CallScope scope(context_, {.stream = comm_});
    tensor = scope.pool_tensor(wanted_);
    scope.hand_out({&*tensor});
    scope.finish();
  }
  tensor.reset();  // when the caller has used it there
  CallScope scope(context_, {.stream = caller_});
  const Tensor next = scope.pool_tensor(wanted_);
  EXPECT_EQ(waits(caller_, comm_), 2) << "for the end of the call, and for what the caller did with the memory";
}

}  // namespace
}  // namespace deep_ep
