
#include <gtest/gtest.h>

#include <algorithm>
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
    EXPECT_EQ(executor_->live_async, 0) << "memory was lost";
    for (const StreamHandle stream : {home_stream_, other_}) executor_->destroy_stream(stream);
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

TEST_F(MemoryCacheTest, MemoryThatTheHomeAloneUsedComesBackAtOnce) {
  const auto block = cache_->allocate(1000);
  cache_->release(block, {});
  EXPECT_EQ(cache_->unused_bytes(), 1024u);
  EXPECT_EQ(cache_->allocate(600).memory, block.memory);
  EXPECT_EQ(cache_->unused_bytes(), 0u);
  EXPECT_EQ(executor_->allocated_async, 1);
  EXPECT_TRUE(at_home().waited_for.empty());
  cache_->release(block, {});
}

TEST_F(MemoryCacheTest, TheHomeWaitsForOtherUsersBeforeReuse) {
  const auto block = cache_->allocate(1000);
  const EventHandle event = executor_->record_event(other_);
  cache_->release(block, {event});
  EXPECT_TRUE(at_home().waited_for.empty()) << "to drop a tensor holds nobody up";
  const auto larger = cache_->allocate(4000);
  EXPECT_NE(larger.memory, block.memory) << "another size";
  EXPECT_TRUE(at_home().waited_for.empty());
  EXPECT_EQ(cache_->allocate(1000).memory, block.memory);
  EXPECT_EQ(at_home().waited_for, std::vector{event});
  cache_->release(block, {});
  cache_->release(larger, {});
}

TEST_F(MemoryCacheTest, TheHomeWaitsForTheDefaultStreamOnlyWhereItLeavesIt) {
  HomeStream& home = *cache_->home();
  FakeExecutor::Stream& the_default = FakeExecutor::of(nullptr);
  const std::uint64_t before = the_default.enqueued;
  for (const StreamHandle stream : {StreamHandle{}, other_}) {
    allocate_in_pool(cache_, 1000)->record_stream(nullptr, false);
    home.works_on(stream);
    const auto again = allocate_in_pool(cache_, 1000);
    EXPECT_EQ(executor_->allocated_async, 1);
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
  cache_->release(large, {event});
  cache_->release(small, {});
  EXPECT_EQ(cache_->allocate(100).memory, small.memory) << "what is there is used first";
  const auto other_size = cache_->allocate(5000);
  EXPECT_EQ(cache_->unused_bytes(), 0u);
  EXPECT_EQ(executor_->live_async, 2);
  EXPECT_EQ(executor_->freed_on, home_stream_);
  EXPECT_EQ(at_home().waited_for, std::vector{event});
  cache_->release(small, {});
  cache_->release(other_size, {});
}

TEST_F(MemoryCacheTest, UnusedMemoryIsGivenBackWhenThereIsNoMore) {
  cache_->release(cache_->allocate(100), {});
  executor_->free_bytes = 4096;
  EXPECT_THROW(cache_->allocate(8192), OutOfMemory);
  EXPECT_EQ(cache_->unused_bytes(), 0u);
  EXPECT_EQ(executor_->live_async, 0);
  EXPECT_EQ(executor_->trims, 1);
}

/// What was given back just now is free for the driver when the stream has come so far.
TEST_F(MemoryCacheTest, WithoutMemoryTheExecutorTrimsItsPool) {
  cache_->release(cache_->allocate(100), {executor_->record_event(other_)});
  executor_->record_event(home_stream_);
  executor_->free_bytes = 4096;
  executor_->free_bytes_trimmed = 8192;
  const auto block = cache_->allocate(8192);
  EXPECT_NE(block.memory, nullptr);
  EXPECT_EQ(executor_->trims, 1);
  EXPECT_EQ(at_home().done, at_home().enqueued) << "trimmed behind what was given back";
  cache_->release(block, {});
}

TEST_F(MemoryCacheTest, WhatAGraphMayUseIsNotReused) {
  std::vector<void*> lost;
  {
    const auto recorded = allocate_in_pool(cache_, 64, true);
    lost.push_back(recorded->data());
  }
  {
    const auto used_while_recording = allocate_in_pool(cache_, 64);
    FakeExecutor::of(other_).capturing = true;
    used_while_recording->record_stream(other_);
    FakeExecutor::of(other_).capturing = false;
    lost.push_back(used_while_recording->data());
  }
  {
    const auto dropped_while_recording = allocate_in_pool(cache_, 64);
    dropped_while_recording->record_stream(other_);
    FakeExecutor::of(other_).capturing = true;
    lost.push_back(dropped_while_recording->data());
  }
  FakeExecutor::of(other_).capturing = false;
  EXPECT_EQ(cache_->unused_bytes(), 0u);
  EXPECT_EQ(executor_->live_async, 3);
  for (void* memory : lost) executor_->free_async(memory, home_stream_);
}

TEST_F(MemoryCacheTest, ARecordingHomeLeavesMemoryToTheExecutor) {
  const auto block = cache_->allocate(64);
  cache_->release(block, {});
  at_home().capturing = true;
  cache_.reset();
  EXPECT_EQ(executor_->live_async, 1);
  executor_->free_async(block.memory, home_stream_);
}

}  // namespace
}  // namespace deep_ep
