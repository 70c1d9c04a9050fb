
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "csrc/memory/storage.hpp"
#include "tests/memory/fake_executor.hpp"

namespace deep_ep {
namespace {

using test::FakeExecutor;

class MemoryCacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!MemoryCache::kReuses) GTEST_SKIP() << "nothing is kept under AddressSanitizer";
  }
  ~MemoryCacheTest() override {
    cache_.reset();
    EXPECT_EQ(executor_->live(), 0u) << "memory was lost";
    for (const StreamHandle stream : {home_stream_, other_}) executor_->destroy_stream(stream);
  }
  void back(const MemoryCache::Block& block, std::vector<EventHandle> events = {}) {
    cache_->release(block, std::move(events));
  }
  FakeExecutor::Stream& at_home() { return FakeExecutor::of(home_stream_); }

  std::shared_ptr<FakeExecutor> executor_ = std::make_shared<FakeExecutor>();
  StreamHandle home_stream_ = executor_->create_stream();
  StreamHandle other_ = executor_->create_stream();
  std::shared_ptr<MemoryCache> cache_ =
      std::make_shared<MemoryCache>(std::make_shared<HomeStream>(executor_, home_stream_));
};

TEST_F(MemoryCacheTest, SizesAreRoundedUpByAnEighthAtMost) {
  std::size_t before = 0;
  for (std::size_t bytes = 0; bytes < 300000; bytes += 13) {
    const std::size_t rounded = MemoryCache::size_class(bytes);
    ASSERT_GE(rounded, bytes);
    ASSERT_LE(rounded, std::max<std::size_t>({512, bytes + 511, bytes + bytes / 8}));
    ASSERT_EQ(rounded % 512, 0u);
    ASSERT_EQ(MemoryCache::size_class(rounded), rounded) << bytes;
    ASSERT_GE(rounded, before);
    before = rounded;
  }
  EXPECT_EQ(MemoryCache::size_class(std::size_t{1} << 33), std::size_t{1} << 33);
  EXPECT_EQ(MemoryCache::size_class(~std::size_t{0}), ~std::size_t{0});
}

TEST_F(MemoryCacheTest, WhatIsUsedAgainIsNotUnused) {
  for (int call = 0; call < 3; ++call) back(cache_->allocate(MemoryCache::kMostUnused / 2));
  back(cache_->allocate(5000));
  EXPECT_EQ(executor_->live(), 2u) << "both are kept";
}

TEST_F(MemoryCacheTest, TheHomeWaitsForOtherUsersBeforeReuse) {
  const auto block = cache_->allocate(1000);
  const EventHandle event = executor_->record_event(other_);
  back(block, {event});
  EXPECT_TRUE(at_home().waited_for.empty()) << "to drop a tensor holds nobody up";
  const auto larger = cache_->allocate(4000);
  EXPECT_NE(larger.memory, block.memory) << "another size";
  EXPECT_TRUE(at_home().waited_for.empty());
  EXPECT_EQ(cache_->allocate(1000).memory, block.memory);
  EXPECT_EQ(at_home().waited_for, std::vector{event});
  back(block);
  back(larger);
}

TEST_F(MemoryCacheTest, TheHomeWaitsForTheDefaultStreamOnlyWhereItLeavesIt) {
  HomeStream& home = *cache_->home();
  FakeExecutor::Stream& the_default = FakeExecutor::of(nullptr);
  const std::uint64_t before = the_default.enqueued;
  for (const StreamHandle stream : {StreamHandle{}, other_}) {
    allocate_in_pool(cache_, 1000)->record_stream(nullptr, false);
    home.works_on(stream);
    const auto again = allocate_in_pool(cache_, 1000);
    EXPECT_EQ(executor_->allocated, 1);
    EXPECT_EQ(the_default.enqueued, before + (stream == nullptr ? 0 : 1));
  }
  ASSERT_EQ(FakeExecutor::of(other_).waited_for.size(), 1u);
  EXPECT_EQ(FakeExecutor::stream_of(FakeExecutor::of(other_).waited_for[0]), &the_default);
  home.works_on(home_stream_);
}

TEST_F(MemoryCacheTest, TooMuchUnusedMemoryGoesBackBeforeMoreIsTaken) {
  // The fake's memory is never touched, so it costs nothing.
  const auto large = cache_->allocate(MemoryCache::kMostUnused + 1);
  const auto small = cache_->allocate(100);
  const EventHandle event = executor_->record_event(other_);
  back(large, {event});
  back(small);
  EXPECT_EQ(cache_->allocate(100).memory, small.memory) << "what is there is used first";
  const auto other_size = cache_->allocate(5000);
  EXPECT_EQ(executor_->live(), 2u);
  EXPECT_EQ(executor_->freed_on, home_stream_);
  EXPECT_EQ(at_home().waited_for, std::vector{event});
  back(small);
  back(other_size);
}

TEST_F(MemoryCacheTest, UnusedMemoryIsGivenBackWhenThereIsNoMore) {
  executor_->most_bytes = 9000;
  back(cache_->allocate(4096));
  const auto block = cache_->allocate(8192);
  EXPECT_EQ(executor_->live(), 1u);
  EXPECT_THROW(cache_->allocate(4096), OutOfMemory);
  back(block);
}

TEST_F(MemoryCacheTest, WhatAGraphMayUseIsNotReused) {
  { const auto recorded = allocate_in_pool(cache_, 64, 1); }
  {
    const auto used_while_recording = allocate_in_pool(cache_, 64);
    FakeExecutor::of(other_).capturing = true;
    used_while_recording->record_stream(other_);
    FakeExecutor::of(other_).capturing = false;
  }
  {
    const auto dropped_while_recording = allocate_in_pool(cache_, 64);
    dropped_while_recording->record_stream(other_);
    FakeExecutor::of(other_).capturing = true;
  }
  FakeExecutor::of(other_).capturing = false;
  EXPECT_EQ(executor_->live(), 3u) << "until the cache goes";
}

TEST_F(MemoryCacheTest, AGraphUsesItsOwnMemoryAgainWhileItIsRecorded) {
  const auto record = [&](std::uint64_t graph) {
    at_home().capturing = FakeExecutor::of(other_).capturing = graph;
    return allocate_in_pool(cache_, 64, graph);
  };
  auto first = record(1);
  void* const memory = first->data();
  first->record_stream(other_, 1);
  EXPECT_NE(record(1)->data(), memory) << "it is in use";
  first.reset();
  at_home().waited_for.clear();
  auto again = record(1);
  EXPECT_EQ(again->data(), memory);
  ASSERT_EQ(at_home().waited_for.size(), 1u);
  EXPECT_EQ(FakeExecutor::stream_of(at_home().waited_for[0]), &FakeExecutor::of(other_));
  auto of_another_too = record(1);
  again.reset();
  of_another_too->record_stream(other_, 2);
  of_another_too.reset();
  EXPECT_EQ(executor_->allocated, 2);
  const std::array of_the_next = {record(2), record(0)};
  EXPECT_EQ(executor_->allocated, 4) << "a replay of the first one may come at any time";
  const std::array of_the_first = {record(1), record(1)};
  EXPECT_EQ(executor_->allocated, 5) << "another graph uses one of its two as well";
  at_home().capturing = 0;
}

}  // namespace
}  // namespace deep_ep
