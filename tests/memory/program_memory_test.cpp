#include "csrc/memory/storage.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

#include "csrc/buffer/call_scope.hpp"
#include "csrc/executor/own_stream.hpp"
#include "deep_ep/error.hpp"
#include "tests/memory/fake_executor.hpp"

namespace deep_ep {
namespace {

using test::FakeExecutor;
using test::FakeHeap;

/// Counts what is out.
class CountingAllocator final : public ResultAllocator {
 public:
  Memory allocate(std::size_t bytes, const Device&, StreamHandle stream) override {
    asked_for = stream;
    if (enqueues != nullptr) enqueued = FakeExecutor::position_of(enqueues->record_event(stream));
    if (bytes > most || live == most_live) throw OutOfMemory("the program has none");
    ++live;
    void* data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    const std::shared_ptr<void> owner(data, [this](void* memory) {
      --live;
      std::free(memory);
    });
    return {static_cast<std::byte*>(data) + skew, owner};
  }
  int live = 0;
  std::size_t most = ~std::size_t{0};
  int most_live = -1;
  std::size_t skew = 0;
  StreamHandle asked_for = nullptr;
  std::shared_ptr<FakeExecutor> enqueues;  ///< on the stream, as an allocator that fills what it gives
  std::uint64_t enqueued = 0;
};

class ProgramMemoryTest : public ::testing::Test {
 protected:
  static FakeExecutor::Stream& of(StreamHandle stream) { return FakeExecutor::of(stream); }
  static bool waits_for(StreamHandle stream, StreamHandle other) {
    return std::ranges::any_of(of(stream).waited_for,
                               [&](const EventHandle& event) { return FakeExecutor::stream_of(event) == &of(other); });
  }
  std::optional<Tensor> result_of(const CallOptions& options) {
    CallScope scope(*context_, options);
    Tensor tensor = scope.pool_tensor(wanted_);
    scope.hand_out(tensor);
    scope.finish();
    for (const StreamHandle stream : {caller_, side_, comm_}) of(stream).waited_for.clear();
    return tensor;
  }

  std::shared_ptr<FakeExecutor> executor_ = std::make_shared<FakeExecutor>();
  std::shared_ptr<CountingAllocator> allocator_ = std::make_shared<CountingAllocator>();
  OwnStream streams_[3] = {OwnStream(*executor_), OwnStream(*executor_), OwnStream(*executor_)};
  StreamHandle caller_ = streams_[0].get(), side_ = streams_[1].get(), comm_ = streams_[2].get();
  std::optional<CallContext> context_{
      std::in_place, executor_, comm_,
      std::make_shared<Arena>(executor_, std::make_shared<FakeHeap>(1 << 20), 0, 1 << 20), allocator_};
  TensorView wanted_ = unplaced({}, DType::uint8, {100});
};

TEST_F(ProgramMemoryTest, GoesBackAtOnceWhereTheCallersStreamAloneUsedIt) {
  auto result = result_of({.stream = caller_});
  EXPECT_EQ(allocator_->asked_for, caller_);
  EXPECT_EQ(allocator_->live, 1);
  EXPECT_EQ(executor_->allocated, 0);
  result.reset();
  EXPECT_EQ(allocator_->live, 0);
  EXPECT_TRUE(of(caller_).waited_for.empty());
}

TEST_F(ProgramMemoryTest, GoesBackWhenTheCommunicationStreamAndOthersHaveEnded) {
  auto result = result_of({.stream = caller_, .async_finish = true});
  result->record_stream(side_);
  result.reset();
  EXPECT_TRUE(of(caller_).waited_for.empty()) << "the caller goes on beside the communication stream";
  executor_->synchronize(comm_);
  EXPECT_TRUE(result_of({.stream = caller_}));
  EXPECT_EQ(allocator_->live, 1) << "the other stream has not ended";
  executor_->synchronize(side_);
  EXPECT_TRUE(result_of({.stream = caller_}));
  EXPECT_EQ(allocator_->live, 0);
}

TEST_F(ProgramMemoryTest, SmallTablesOfHandlesOnTheDefaultStreamAreTheLibrarys) {
  struct Framework final : ResultTensors {
    std::vector<Tensor> make(std::span<const TensorView>, const Order&) override { return {}; }
    std::vector<Tensor> make_in_heap(std::span<const TensorView>, const Order&,
                                     const std::shared_ptr<HeapPieces>&) override {
      return {};
    }
  };
  const auto live_of = [&](StreamHandle stream, std::int64_t bytes, bool with_framework) {
    CallContext context(executor_, comm_,
                        std::make_shared<Arena>(executor_, std::make_shared<FakeHeap>(1 << 20), 0, 1 << 20), allocator_,
                        with_framework ? std::make_shared<Framework>() : nullptr);
    CallScope scope(context, {.stream = stream});
    const Tensor table = scope.pool_tensor(unplaced({}, DType::uint8, {bytes}));
    scope.finish();
    return allocator_->live;
  };
  EXPECT_EQ(live_of(nullptr, 1 << 20, true), 0);
  EXPECT_EQ(live_of(nullptr, (1 << 20) + 1, true), 1);
  EXPECT_EQ(live_of(caller_, 100, true), 1);
  EXPECT_EQ(live_of(nullptr, 100, false), 1) << "a result";
}

/// As a handle, or as input: nobody names the stream of that call.
TEST_F(ProgramMemoryTest, GoesBackAfterLaterCallsOnOtherStreams) {
  auto result = result_of({.stream = caller_});
  CallScope(*context_, {.stream = caller_, .async_finish = true}).finish();
  result.reset();
  EXPECT_EQ(allocator_->live, 1);
  executor_->synchronize(comm_);
  EXPECT_TRUE(result_of({.stream = caller_}));
  EXPECT_EQ(allocator_->live, 0);
}

TEST_F(ProgramMemoryTest, TheCallComesBehindWhatTheAllocatorEnqueued) {
  allocator_->enqueues = executor_;
  CallScope scope(*context_, {.stream = caller_, .async_finish = true});
  const Tensor tensor = scope.pool_tensor(wanted_);
  const auto behind = [&](const EventHandle& event) {
    return FakeExecutor::stream_of(event) == &of(caller_) && FakeExecutor::position_of(event) > allocator_->enqueued;
  };
  EXPECT_TRUE(std::ranges::any_of(of(comm_).waited_for, behind));
  scope.finish();
}

TEST_F(ProgramMemoryTest, InARecordingItGoesBackToTheRecording) {
  of(caller_).capturing = of(comm_).capturing = true;
  auto result = result_of({.stream = caller_});
  result.reset();
  EXPECT_EQ(allocator_->live, 0) << "so that the graph uses it again";
  EXPECT_TRUE(waits_for(caller_, comm_));
}

TEST_F(ProgramMemoryTest, ARecordingDoesNotWaitForWorkOutsideSoTheMemoryWaits) {
  auto result = result_of({.stream = caller_, .async_finish = true});
  of(caller_).capturing = true;
  result.reset();
  EXPECT_TRUE(of(caller_).waited_for.empty());
  EXPECT_EQ(allocator_->live, 1);
  of(caller_).capturing = false;
  EXPECT_TRUE(result_of({.stream = caller_}));
  EXPECT_EQ(allocator_->live, 1) << "the work has not ended";
  executor_->synchronize(comm_);
  EXPECT_TRUE(result_of({.stream = caller_}));
  EXPECT_EQ(allocator_->live, 0);
}

TEST_F(ProgramMemoryTest, WithoutMemoryTheHostWaitsForWhatOthersStillUse) {
  allocator_->most_live = 1;
  auto result = result_of({.stream = caller_, .async_finish = true});
  EXPECT_THROW(result_of({.stream = caller_}), OutOfMemory) << "the result is in use";
  result.reset();
  EXPECT_EQ(allocator_->live, 1) << "the call has not ended";
  EXPECT_TRUE(result_of({.stream = caller_, .async_finish = true}));
  of(caller_).capturing = true;
  EXPECT_THROW(result_of({.stream = caller_}), OutOfMemory) << "a host must not wait while a graph is recorded";
}

TEST_F(ProgramMemoryTest, WhatAGraphMayUseAgainStaysUntilTheBufferGoes) {
  auto result = result_of({.stream = caller_});
  of(side_).capturing = true;
  result->record_stream(side_);
  result.reset();
  of(side_).capturing = false;
  executor_->synchronize(side_);
  EXPECT_TRUE(result_of({.stream = caller_}));
  EXPECT_EQ(allocator_->live, 1);
  context_.reset();
  EXPECT_EQ(allocator_->live, 0);
}

TEST_F(ProgramMemoryTest, CallsBehindAnEventUseThePool) {
  auto result = result_of({.stream = caller_, .previous_event = executor_->record_event(side_)});
  EXPECT_EQ(allocator_->live, 0) << "the call does not come after the caller's stream, which may still use the memory";
  EXPECT_EQ(executor_->allocated, 1);
}

TEST_F(ProgramMemoryTest, ErrorsOfTheAllocatorAreTheCalls) {
  allocator_->most = 10;
  EXPECT_THROW(result_of({.stream = caller_}), OutOfMemory);
  allocator_->most = 1 << 20;
  allocator_->skew = 16;
  try {
    result_of({.stream = caller_});
    FAIL() << "misaligned";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("multiples of 256"), std::string::npos) << error.what();
  }
  EXPECT_EQ(allocator_->live, 0);
}

}  // namespace
}  // namespace deep_ep
