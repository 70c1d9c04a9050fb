#include "csrc/memory/arena.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <thread>
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

TEST_F(ArenaTest, GivingBackTwiceOrSomethingElseIsRefused) {
  const auto arena = make_arena(8192);
  auto* const piece = static_cast<std::byte*>(arena->take(1024, user_));
  EXPECT_THROW(arena->release(piece + 512, {}), Error);
  arena->release(piece, {});
  EXPECT_THROW(arena->release(piece, {}), Error);
}

TEST_F(ArenaTest, EventsGoToTheNextUsersOfAllPartsUntilTheHomeHasWaited) {
  const auto arena = make_arena(1536);
  void* const piece = arena->take(1536, user_);
  const EventHandle event = executor_->record_event(make_stream());
  arena->release(piece, {{event}});
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
    arena->release(piece, {{executor_->record_event(stream)}});
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
    arena->release(pieces[i], {{event}});
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

TEST_F(ArenaTest, StorageSurvivesArenaOwnersAndADriverThatIsGone) {
  auto arena = make_arena(1024);
  const std::weak_ptr<Arena> watch = arena;
  const StreamHandle stream = make_stream();
  auto storage = allocate_in_arena(arena, 512, home_);
  storage->record_stream(stream);
  arena.reset();
  EXPECT_FALSE(watch.expired());
  state(stream).gone = true;
  storage.reset();
  EXPECT_TRUE(watch.expired());
}

// Random histories against a shadow model: a map of live blocks, and for every 512 bytes the events of their last
// users.
TEST_F(ArenaTest, RandomHistoriesMatchAShadowModel) {
  constexpr std::size_t kUnits = 96;
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
    const auto arena = make_arena(kUnits * 512);
    const std::array streams = {make_stream(), make_stream(), make_stream()};
    std::map<std::byte*, std::size_t> live;              // and their units
    std::array<std::vector<EventHandle>, kUnits> users;  // of free units
    std::array<bool, kUnits> taken{};
    std::set<EventHandle> waited;  // what the home was made to wait for
    const std::byte* const first = test::fake_memory().get();
    const auto unit_range = [&](const std::byte* at, std::size_t units) {
      const auto begin = static_cast<std::size_t>(at - first) / 512;
      return std::pair{begin, begin + units};
    };
    for (int step = 0; step < 600; ++step) {
      const std::size_t action = pick(20);
      if (action < 9) {
        const std::size_t bytes = pick(12 * 512);
        const std::size_t units = std::max<std::size_t>((bytes + 511) / 512, 1);
        auto* const taken_at = static_cast<std::byte*>(arena->take(bytes, user_));
        std::size_t run = 0;
        std::size_t longest = 0;
        for (const bool used : taken) {
          run = used ? 0 : run + 1;
          longest = std::max(longest, run);
        }
        ASSERT_EQ(taken_at != nullptr, longest >= units);
        if (taken_at == nullptr) continue;
        const auto [begin, end] = unit_range(taken_at, units);
        ASSERT_LE(end, kUnits);
        for (const EventHandle& event : taken_waits()) waited.insert(event);
        for (std::size_t unit = begin; unit < end; ++unit) {
          ASSERT_FALSE(taken[unit]);
          taken[unit] = true;
          for (const EventHandle& event : users[unit]) {
            if (executor_->event_done(event)) continue;
            ASSERT_TRUE(waited.contains(event));
          }
          users[unit].clear();
        }
        live[taken_at] = units;
      } else if (action < 18) {
        if (live.empty()) continue;
        const auto one = std::next(live.begin(), static_cast<std::ptrdiff_t>(pick(live.size())));
        const auto [piece, units] = *one;
        live.erase(one);
        const auto [begin, end] = unit_range(piece, units);
        if (pick(100) == 0) {
          arena->release(piece, std::nullopt);
          continue;
        }
        std::vector<EventHandle> events;
        for (std::size_t count = pick(3); count > 0; --count) {
          events.push_back(executor_->record_event(streams[pick(streams.size())]));
        }
        for (std::size_t unit = begin; unit < end; ++unit) {
          taken[unit] = false;
          users[unit] = events;
        }
        arena->release(piece, events);
      } else {
        auto& stream = state(streams[pick(streams.size())]);
        stream.done += pick(stream.enqueued - stream.done + 1);
      }
    }
  }
}

TEST_F(ArenaTest, ThreadsShareIt) {
  const auto arena = make_arena(64 * 512);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      std::vector<void*> mine;
      for (int step = 0; step < 2000; ++step) {
        if (mine.size() < 8 && random() % 2 == 0) {
          if (void* const piece = arena->take(random() % 2048, nullptr)) mine.push_back(piece);
        } else if (!mine.empty()) {
          arena->release(mine.back(), std::vector<EventHandle>());
          mine.pop_back();
        }
      }
      for (void* piece : mine) arena->release(piece, std::vector<EventHandle>());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena->largest_free(), 64u * 512);
}

}  // namespace
}  // namespace deep_ep
