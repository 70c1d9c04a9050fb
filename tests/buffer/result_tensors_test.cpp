// Results as tensors of a framework: for which streams they are made, and where they lie.
#include "deep_ep/result_tensors.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/buffer/call_scope.hpp"
#include "csrc/executor/own_stream.hpp"
#include "csrc/memory/arena.hpp"
#include "tests/memory/fake_executor.hpp"

namespace deep_ep {
namespace {

using test::FakeExecutor;

/// A framework that remembers what it was asked.
class FakeFramework final : public ResultTensors {
 public:
  class Owned final : public Tensor::Storage {
   public:
    explicit Owned(std::size_t bytes) : memory(std::max<std::size_t>(bytes, 1)) {}
    void record_stream(StreamHandle) override {}
    std::vector<std::byte> memory;
  };

  std::vector<Tensor> make(std::span<const TensorView> wanted, const Order& order,
                           const std::shared_ptr<HeapPieces>& heap) override {
    orders.push_back(order);
    if (heap != nullptr) {
      ++asked_for_heap;
      pieces = heap;
    }
    if (enqueues != nullptr) enqueues->record_event(order.stream);
    std::vector<Tensor> made;
    for (TensorView view : wanted) {
      const bool inside = heap != nullptr && !elsewhere;
      const auto owner = std::make_shared<Owned>(inside ? 0 : view.bytes());
      view.data = inside ? heap->take(view.bytes(), order.stream) : owner->memory.data();
      if (view.data == nullptr) return {};
      if (mistake) mistake(view);
      made.emplace_back(view, owner);
    }
    return made;
  }

  std::vector<Order> orders;
  int asked_for_heap = 0;
  bool elsewhere = false;
  std::shared_ptr<HeapPieces> pieces;
  std::function<void(TensorView&)> mistake;  ///< changes what it makes
  FakeExecutor* enqueues = nullptr;          ///< on the stream, as a framework that fills what it makes
};

class ResultTensorsTest : public ::testing::Test {
 protected:
  static FakeExecutor::Stream& of(StreamHandle stream) { return FakeExecutor::of(stream); }
  static bool waits_for(StreamHandle stream, StreamHandle other) {
    return std::ranges::any_of(of(stream).waited_for,
                               [&](const EventHandle& event) { return FakeExecutor::stream_of(event) == &of(other); });
  }
  void expect_order(const CallOptions& options, StreamHandle stream, std::optional<StreamHandle> other) {
    framework_->orders.clear();
    CallScope scope(context_, options);
    results(scope, {{small_}});
    scope.finish();
    ASSERT_EQ(framework_->orders.size(), 1u);
    EXPECT_EQ(framework_->orders[0].stream, stream);
    EXPECT_EQ(framework_->orders[0].other, other);
  }

  std::shared_ptr<FakeExecutor> executor_ = std::make_shared<FakeExecutor>();
  std::shared_ptr<FakeFramework> framework_ = std::make_shared<FakeFramework>();
  OwnStream streams_[3] = {OwnStream(*executor_), OwnStream(*executor_), OwnStream(*executor_)};
  StreamHandle caller_ = streams_[0].get(), side_ = streams_[1].get(), comm_ = streams_[2].get();
  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>(executor_, test::fake_memory(), std::size_t{1} << 20);
  CallContext context_{executor_, comm_, arena_, framework_};
  TensorView small_ = unplaced({}, DType::uint8, {100}), large_ = unplaced({}, DType::uint8, {600 << 10});

  /// The tensors of these pieces that a call makes; none if there is no room.
  static std::vector<Tensor> results(const CallScope& scope, const std::vector<std::vector<TensorView>>& pieces,
                                     bool in_heap = false) {
    std::vector<Tensor> made(4);
    WantedTensors wanted({});
    std::size_t next = 0;
    for (const std::vector<TensorView>& piece : pieces) {
      for (const TensorView& view : piece) wanted.add(made[next++], nullptr, view);
      wanted.begin_piece();
    }
    made.resize(scope.make_results(wanted, in_heap) ? next : 0);
    return made;
  }
};

TEST_F(ResultTensorsTest, AreMadeForTheStreamThatTheCallComesAfter) {
  const EventHandle event = executor_->record_event(side_);
  expect_order({.stream = caller_}, caller_, std::nullopt);
  expect_order({.stream = caller_, .async_finish = true}, caller_, comm_);
  expect_order({.stream = caller_, .previous_event = event}, comm_, caller_);
  expect_order({.stream = caller_, .previous_event = event, .async_finish = true}, comm_, caller_);
  expect_order({.stream = comm_, .previous_event = event, .async_finish = true}, comm_, std::nullopt);
}

TEST_F(ResultTensorsTest, TheCallComesBehindWhatTheFrameworkEnqueues) {
  framework_->enqueues = executor_.get();
  CallScope scope(context_, {.stream = caller_, .async_finish = true});
  of(comm_).waited_for.clear();
  results(scope, {{small_}});
  EXPECT_TRUE(waits_for(comm_, caller_));
  of(comm_).waited_for.clear();
  results(scope, {{small_}}, true);
  EXPECT_TRUE(waits_for(comm_, caller_));
}

TEST_F(ResultTensorsTest, LieInTheHeapWhereItHasRoomForAll) {
  const std::vector<std::vector<TensorView>> pieces = {{small_}, {large_, small_}};
  CallScope scope(context_, {.stream = caller_});
  const auto made = results(scope, pieces, true);
  ASSERT_EQ(made.size(), 3u);
  EXPECT_EQ(made[1].view().bytes(), large_.bytes());
  EXPECT_TRUE(results(scope, pieces, true).empty()) << "the heap is full";
  framework_->elsewhere = true;
  EXPECT_TRUE(results(scope, {{small_}}, true).empty()) << "peers cannot write there";
}

TEST_F(ResultTensorsTest, AreRefusedIfTheyAreNotWhatWasAskedFor) {
  const std::vector<TensorView> wanted = {small_, unplaced({}, DType::bfloat16, {4, 8})};
  const auto refusal = [&](const std::function<void(TensorView&)>& mistake, bool heap = false) {
    framework_->mistake = [&](TensorView& view) {
      if (view.dims == 2) mistake(view);
    };
    framework_->elsewhere = heap;
    CallScope scope(context_, {.stream = caller_});
    try {
      results(scope, {wanted}, heap);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string returned = "tensor 1 that ResultTensors::make returned is ";
  const std::string allowed = ", allowed: bfloat16[4, 8] on cpu";
  const auto gaps = [](TensorView& view) { view.strides = {16, 1}; };
  EXPECT_EQ(refusal(gaps), returned + "bfloat16[4, 8] with strides [16, 1] on cpu" + allowed);
  EXPECT_NE(refusal(gaps, true).find("ResultTensors::make returned is bfloat16[4, 8] with strides [16, 1]"),
            std::string::npos);
  EXPECT_EQ(refusal([](TensorView& view) { view.shape[0] = 5; }), returned + "bfloat16[5, 8] on cpu" + allowed);
  EXPECT_EQ(refusal([](TensorView& view) { view.dtype = DType::float16; }),
            returned + "float16[4, 8] on cpu" + allowed);
  EXPECT_EQ(refusal([](TensorView& view) { view.data = nullptr; }),
            returned + "bfloat16[4, 8] on cpu without memory" + allowed);
  EXPECT_EQ(refusal([](TensorView&) {}), "");
  framework_->mistake = {};
  framework_->mistake = [](TensorView& view) { view.strides[0] = 99; };
  CallScope scope(context_, {.stream = caller_});
  EXPECT_EQ(results(scope, {{unplaced({}, DType::uint8, {1, 8})}}).size(), 1u) << "the stride of one row means nothing";
}

TEST_F(ResultTensorsTest, OfAGraphLieInItsOwnMemory) {
  of(caller_).capturing = of(comm_).capturing = true;
  CallScope scope(context_, {.stream = caller_});
  EXPECT_TRUE(results(scope, {{small_}}, true).empty());
  EXPECT_EQ(framework_->asked_for_heap, 0);
  scope.finish();
  of(caller_).capturing = of(comm_).capturing = false;
}

TEST_F(ResultTensorsTest, PiecesOfTheHeapGoBackBehindTheirStream) {
  Arena& pieces = *arena_;
  constexpr std::size_t kBytes = 600 << 10;
  auto* const piece = static_cast<std::byte*>(pieces.take(kBytes, side_));
  ASSERT_NE(piece, nullptr);
  EXPECT_TRUE(pieces.contains(piece) && pieces.contains(piece + kBytes - 1));
  EXPECT_FALSE(pieces.contains(piece + (1 << 20)) || pieces.contains(piece - 1));
  EXPECT_LT(pieces.largest_free(), kBytes);
  EXPECT_EQ(pieces.take(kBytes, side_), nullptr);
  pieces.give_back(piece, kBytes, side_);
  EXPECT_EQ(pieces.take(kBytes, caller_), piece);
  EXPECT_TRUE(waits_for(caller_, side_)) << "work there may still use it";
  of(caller_).capturing = true;
  pieces.give_back(piece, kBytes, caller_);
  of(caller_).capturing = false;
  EXPECT_EQ(pieces.take(kBytes, caller_), nullptr) << "a graph may use it";
}

}  // namespace
}  // namespace deep_ep
