#include "csrc/memory/arena.hpp"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "csrc/memory/storage.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "tests/memory/fake_executor.hpp"

namespace deep_ep {
namespace {

using test::FakeExecutor;

class ArenaTest : public ::testing::Test {
 protected:
  ~ArenaTest() override {
    for (const StreamHandle stream : streams_) executor_->destroy_stream(stream);
  }

  std::shared_ptr<Arena> make_arena(std::size_t bytes) {
    return std::make_shared<Arena>(executor_, test::fake_memory(), bytes);
  }
  StreamHandle make_stream() {
    streams_.push_back(executor_->create_stream());
    return streams_.back();
  }
  FakeExecutor::Stream& state(StreamHandle stream) { return FakeExecutor::of(stream); }
  /// What `user_` has waited for since the last question.
  std::vector<EventHandle> taken_waits() { return std::exchange(state(user_).waited_for, {}); }

  std::shared_ptr<FakeExecutor> executor_ = std::make_shared<FakeExecutor>();
  std::vector<StreamHandle> streams_;
  StreamHandle user_ = make_stream();
  std::shared_ptr<HomeStream> home_ = std::make_shared<HomeStream>(executor_, make_stream());
};

TEST_F(ArenaTest, WhatDoesNotFitGetsNothing) {
  EXPECT_EQ(make_arena(0)->largest_free(), 0u);
  EXPECT_FALSE(make_arena(0)->take(0, user_));
  EXPECT_FALSE(make_arena(8192)->take(~std::size_t{0}, user_)) << "rounded up, it is a request for nothing";
}

TEST_F(ArenaTest, PiecesThatAreNotHandedOutAreRefused) {
  const auto arena = make_arena(4 * 512);
  std::vector<std::byte*> pieces;
  for (int i = 0; i < 4; ++i) pieces.push_back(static_cast<std::byte*>(arena->take(512, user_)));
  const auto is_refused = [&](std::byte* piece, std::size_t bytes) {
    EXPECT_THROW(arena->release(piece, bytes, {}), Error) << (piece - pieces[0]) << ", " << bytes;
  };
  is_refused(pieces[0] - 512, 512);
  is_refused(pieces[3] + 512, 0);
  is_refused(pieces[3], 513);
  is_refused(pieces[0], ~std::size_t{0});
  arena->release(pieces[1], 512, {});
  is_refused(pieces[1], 512);
  is_refused(pieces[0], 513);
  arena->release(pieces[2], 512, {});
  is_refused(pieces[2], 512);
  arena->give_back(pieces[1], 512, user_);
  EXPECT_EQ(arena->largest_free(), 2u * 512);
  arena->release(pieces[0], 512, {});
  arena->release(pieces[3], 512, {});
  EXPECT_EQ(arena->largest_free(), 4u * 512);
}

TEST_F(ArenaTest, EventsGoToTheNextUsersOfAllPartsUntilTheHomeHasWaited) {
  const auto arena = make_arena(1536);
  void* const piece = arena->take(1536, user_);
  const EventHandle event = executor_->record_event(make_stream());
  arena->release(piece, 1536, {event});
  arena->take(512, user_);
  EXPECT_EQ(taken_waits(), std::vector{event});
  const auto first = allocate_in_arena(arena, 512, home_);
  const auto second = allocate_in_arena(arena, 512, home_);
  ASSERT_TRUE(second);
  EXPECT_EQ(state(home_->handle()).waited_for, std::vector{event})
      << "not behind the other user's wait, once behind it";
}

TEST_F(ArenaTest, FinishedEventsDoNotPileUp) {
  const auto arena = make_arena(64 * 512);
  const StreamHandle stream = make_stream();
  std::vector<void*> pieces;
  for (int i = 0; i < 64; ++i) pieces.push_back(arena->take(512, user_));
  for (void* piece : pieces) {
    arena->release(piece, 512, {executor_->record_event(stream)});
    executor_->synchronize(stream);
  }
  EXPECT_TRUE(arena->take(64 * 512, user_));
  EXPECT_LE(taken_waits().size(), 8u);
}

TEST_F(ArenaTest, MergedBlocksWaitForTheUsersOfAllParts) {
  const auto arena = make_arena(1536);
  const StreamHandle stream = make_stream();
  std::vector<void*> pieces;
  std::set<EventHandle> events;
  for (int i = 0; i < 3; ++i) pieces.push_back(arena->take(512, user_));
  for (const std::size_t i : {0u, 2u, 1u}) {
    const EventHandle event = executor_->record_event(stream);
    events.insert(event);
    arena->release(pieces[i], 512, {event});
  }
  ASSERT_TRUE(arena->take(1536, user_));
  const std::vector<EventHandle> waits = taken_waits();
  EXPECT_EQ(std::set<EventHandle>(waits.begin(), waits.end()), events);
}

TEST_F(ArenaTest, StorageGivesBackBehindEveryOtherStreamThatUsedIt) {
  const auto arena = make_arena(512);
  const StreamHandle other = make_stream();
  auto storage = allocate_in_arena(arena, 100, home_);
  ASSERT_TRUE(storage);
  EXPECT_EQ(allocate_in_arena(arena, 100, home_), nullptr);
  EXPECT_FALSE(storage->knows_stream(other));
  storage->record_stream(other);
  EXPECT_TRUE(storage->knows_stream(other));
  storage->record_stream(other);
  storage.reset();
  storage = allocate_in_arena(arena, 100, home_);
  ASSERT_TRUE(storage);
  ASSERT_EQ(state(home_->handle()).waited_for.size(), 1u);
  EXPECT_EQ(FakeExecutor::stream_of(state(home_->handle()).waited_for[0]), &state(other));
}

TEST_F(ArenaTest, StorageUsedByAGraphIsNeverReused) {
  const auto arena = make_arena(2048);
  const StreamHandle stream = make_stream();
  auto named_inside = allocate_in_arena(arena, 512, home_);
  auto dropped_inside = allocate_in_arena(arena, 512, home_);
  auto by_call = allocate_in_arena(arena, 512, home_);
  dropped_inside->record_stream(stream);
  state(stream).capturing = true;
  named_inside->record_stream(stream);
  by_call->record_stream(stream, true);
  dropped_inside.reset();
  state(stream).capturing = false;
  named_inside.reset();
  by_call.reset();
  EXPECT_EQ(arena->largest_free(), 512u);
}

TEST_F(ArenaTest, APieceThatIsTooSmallIsPassedOver) {
  const auto arena = make_arena(4 * 512);
  void* const first = arena->take(512, user_);
  auto* const second = static_cast<std::byte*>(arena->take(512, user_));
  arena->release(first, 512, {});
  EXPECT_EQ(arena->take(1024, user_), second + 512);
  EXPECT_EQ(arena->take(1024, user_), nullptr);
  EXPECT_EQ(arena->take(512, user_), first);
}

}  // namespace
}  // namespace deep_ep
