#include "csrc/memory/arena.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "csrc/memory/storage.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "tests/memory/fake_executor.hpp"

namespace deep_ep {
namespace {

using test::FakeExecutor;
using test::FakeHeap;

class ArenaTest : public ::testing::Test {
 protected:
  ~ArenaTest() override {
    for (const StreamHandle stream : streams_) executor_->destroy_stream(stream);
  }

  std::shared_ptr<Arena> make_arena(std::uint64_t offset, std::size_t bytes, std::size_t heap_bytes = 1 << 20) {
    return std::make_shared<Arena>(executor_, std::make_shared<FakeHeap>(heap_bytes), offset, bytes);
  }
  StreamHandle make_stream() {
    streams_.push_back(executor_->create_stream());
    return streams_.back();
  }
  FakeExecutor::Stream& state(StreamHandle stream) { return FakeExecutor::of(stream); }

  std::shared_ptr<FakeExecutor> executor_ = std::make_shared<FakeExecutor>();
  std::vector<StreamHandle> streams_;
  std::shared_ptr<HomeStream> home_ = std::make_shared<HomeStream>(executor_, make_stream());
};

TEST_F(ArenaTest, ArenaMustLieInsideTheHeap) {
  EXPECT_THROW(make_arena(1 << 20, 1), InvalidArgument);
  EXPECT_THROW(make_arena(512, ~std::size_t{0}), InvalidArgument);
  EXPECT_EQ(make_arena(1 << 20, 0)->usage().total, 0u);
  EXPECT_FALSE(make_arena(1 << 20, 0)->allocate(0));
  EXPECT_FALSE(make_arena(0, 8192)->allocate(~std::size_t{0})) << "rounded up, it is a request for nothing";
}

TEST_F(ArenaTest, GivingBackTwiceOrSomethingElseIsRefused) {
  const auto arena = make_arena(0, 8192);
  const auto a = arena->allocate(512);
  arena->release(a->block, {});
  EXPECT_THROW(arena->release(a->block, {}), Error);
  const auto b = arena->allocate(1024);
  EXPECT_THROW(arena->release({.offset = b->block.offset, .bytes = 512}, {}), Error);
  EXPECT_THROW(arena->pin({.offset = 4096, .bytes = 512}), Error);
}

TEST_F(ArenaTest, EventsGoToTheNextUserOfAnyPartAndThenNoMore) {
  const auto arena = make_arena(0, 1024);
  const StreamHandle stream = make_stream();
  auto allocation = arena->allocate(1024);
  const EventHandle event = executor_->record_event(stream);
  arena->release(allocation->block, {event});
  allocation = arena->allocate(512);
  EXPECT_EQ(allocation->wait_for, std::vector{event});
  EXPECT_TRUE(arena->allocate(512)->wait_for.empty()) << "the home has waited already";
}

TEST_F(ArenaTest, FinishedEventsDoNotPileUp) {
  const auto arena = make_arena(0, 64 * 512);
  const StreamHandle stream = make_stream();
  std::vector<Arena::Block> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(arena->allocate(512)->block);
  for (const Arena::Block& block : blocks) {
    arena->release(block, {executor_->record_event(stream)});
    executor_->synchronize(stream);
  }
  EXPECT_LE(arena->allocate(64 * 512)->wait_for.size(), 8u);
}

TEST_F(ArenaTest, MergedBlocksWaitForTheUsersOfAllParts) {
  const auto arena = make_arena(0, 1536);
  const StreamHandle stream = make_stream();
  std::vector<Arena::Block> blocks;
  std::set<EventHandle> events;
  for (int i = 0; i < 3; ++i) blocks.push_back(arena->allocate(512)->block);
  for (const std::size_t i : {0u, 2u, 1u}) {
    const EventHandle event = executor_->record_event(stream);
    events.insert(event);
    arena->release(blocks[i], {event});
  }
  const auto whole = arena->allocate(1536);
  ASSERT_TRUE(whole);
  EXPECT_EQ(std::set<EventHandle>(whole->wait_for.begin(), whole->wait_for.end()), events);
}

TEST_F(ArenaTest, StorageGivesBackBehindEveryOtherStreamThatUsedIt) {
  const auto arena = make_arena(0, 512);
  const StreamHandle other = make_stream();
  auto storage = ArenaStorage::allocate(arena, 100, home_);
  ASSERT_TRUE(storage);
  EXPECT_EQ(ArenaStorage::allocate(arena, 100, home_), nullptr);
  EXPECT_FALSE(storage->knows_stream(other));
  storage->record_stream(other);
  EXPECT_TRUE(storage->knows_stream(other));
  storage->record_stream(other);
  storage.reset();
  storage = ArenaStorage::allocate(arena, 100, home_);
  ASSERT_TRUE(storage);
  ASSERT_EQ(state(home_->handle()).waited_for.size(), 1u);
  EXPECT_EQ(FakeExecutor::stream_of(state(home_->handle()).waited_for[0]), &state(other));
}

TEST_F(ArenaTest, StorageUsedByAGraphIsNeverReused) {
  const auto arena = make_arena(0, 2048);
  const StreamHandle stream = make_stream();
  auto named_inside = ArenaStorage::allocate(arena, 512, home_);
  auto dropped_inside = ArenaStorage::allocate(arena, 512, home_);
  auto by_call = ArenaStorage::allocate(arena, 512, home_);
  dropped_inside->record_stream(stream);
  state(stream).capturing = true;
  named_inside->record_stream(stream);
  by_call->record_stream(stream, true);
  dropped_inside.reset();
  state(stream).capturing = false;
  named_inside.reset();
  by_call.reset();
  EXPECT_EQ(arena->usage().pinned, 1536u);
}

TEST_F(ArenaTest, StorageSurvivesArenaOwnersAndADriverThatIsGone) {
  auto arena = make_arena(0, 1024);
  const std::weak_ptr<Arena> watch = arena;
  const StreamHandle stream = make_stream();
  auto storage = ArenaStorage::allocate(arena, 512, home_);
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
    const auto arena = make_arena(512, kUnits * 512);
    const std::array streams = {make_stream(), make_stream(), make_stream()};
    std::vector<Arena::Block> live;
    std::array<std::vector<EventHandle>, kUnits> users;  // of free units
    std::array<bool, kUnits> taken{};
    std::set<EventHandle> waited;  // what the home was made to wait for
    std::size_t pinned = 0;
    const auto unit_range = [](const Arena::Block& block) {
      return std::pair{block.offset / 512 - 1, block.offset / 512 - 1 + block.bytes / 512};
    };
    for (int step = 0; step < 600; ++step) {
      const std::size_t action = pick(20);
      if (action < 9) {
        const std::size_t bytes = pick(12 * 512);
        const std::size_t units = std::max<std::size_t>((bytes + 511) / 512, 1);
        const auto allocation = arena->allocate(bytes);
        std::size_t run = 0;
        std::size_t longest = 0;
        for (const bool used : taken) {
          run = used ? 0 : run + 1;
          longest = std::max(longest, run);
        }
        ASSERT_EQ(allocation.has_value(), longest >= units);
        if (!allocation) continue;
        ASSERT_EQ(allocation->block.bytes, units * 512);
        const auto [begin, end] = unit_range(allocation->block);
        ASSERT_LE(end, kUnits);
        waited.insert(allocation->wait_for.begin(), allocation->wait_for.end());
        for (std::size_t unit = begin; unit < end; ++unit) {
          ASSERT_FALSE(taken[unit]);
          taken[unit] = true;
          for (const EventHandle& event : users[unit]) {
            if (executor_->event_done(event)) continue;
            ASSERT_TRUE(waited.contains(event));
          }
          users[unit].clear();
        }
        live.push_back(allocation->block);
      } else if (action < 18) {
        if (live.empty()) continue;
        const std::size_t index = pick(live.size());
        const Arena::Block block = live[index];
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(index));
        const auto [begin, end] = unit_range(block);
        if (pick(100) == 0) {
          arena->pin(block);
          pinned += block.bytes;
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
        arena->release(block, events);
      } else {
        auto& stream = state(streams[pick(streams.size())]);
        stream.done += pick(stream.enqueued - stream.done + 1);
      }
      const Arena::Usage usage = arena->usage();
      const auto used = static_cast<std::size_t>(std::count(taken.begin(), taken.end(), true));
      ASSERT_EQ(usage.used, used * 512);
      ASSERT_EQ(usage.pinned, pinned);
    }
  }
}

TEST_F(ArenaTest, ThreadsShareIt) {
  const auto arena = make_arena(0, 64 * 512);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      std::vector<Arena::Block> mine;
      for (int step = 0; step < 2000; ++step) {
        if (mine.size() < 8 && random() % 2 == 0) {
          if (const auto allocation = arena->allocate(random() % 2048)) mine.push_back(allocation->block);
        } else if (!mine.empty()) {
          arena->release(mine.back(), {});
          mine.pop_back();
        }
      }
      for (const Arena::Block& block : mine) arena->release(block, {});
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena->usage().used, 0u);
  EXPECT_EQ(arena->usage().largest_free, arena->usage().total);
}

}  // namespace
}  // namespace deep_ep
