#include "csrc/buffer/heap_layout.hpp"

#include <gtest/gtest.h>

#include "deep_ep/error.hpp"
#include "tests/support/bytes.hpp"

namespace deep_ep {
namespace {

using test::kMiB;

TEST(HeapLayout, PartsFollowEachOther) {
  HeapLayout layout = HeapLayout::make({.heap_bytes = 64 * kMiB, .low_latency = {.bytes = 32 * kMiB}}, 8);
  EXPECT_EQ(layout.window_bytes, 16 * kMiB) << "a quarter";
  EXPECT_EQ(layout.low_latency.begin, layout.control.bytes());
  EXPECT_EQ(layout.low_latency.bytes_of_calls(), 32 * kMiB) << "all of what was asked for is the calls'";
  EXPECT_EQ(layout.window_at(), layout.control.bytes() + layout.low_latency.bytes);
  EXPECT_EQ(layout.arena_at(), layout.window_at() + 16 * kMiB);
  EXPECT_EQ(layout.bytes(), 64 * kMiB + layout.low_latency.bytes);
  EXPECT_EQ(layout.window_at() % kLine, 0u);

  const std::size_t before = layout.window_at();
  layout.add_staging(0);
  EXPECT_EQ(layout.staging.begin, before);
  EXPECT_GT(layout.staging.bytes, 0u);
  EXPECT_EQ(layout.window_at(), before + layout.staging.bytes);
  EXPECT_EQ(layout.bytes(), 64 * kMiB + layout.low_latency.bytes + layout.staging.bytes) << "the arena keeps its size";
  HeapLayout by_rails = HeapLayout::make({.heap_bytes = 64 * kMiB, .low_latency = {.bytes = 32 * kMiB}}, 8);
  by_rails.add_staging(2);
  EXPECT_GT(by_rails.staging.bytes, layout.staging.bytes) << "with rows to hand on";
}

TEST(HeapLayout, WithoutLowLatencyMemoryThereIsNone) {
  const HeapLayout layout = HeapLayout::make({.heap_bytes = 8 * kMiB, .window_bytes = kMiB + 1}, 2);
  EXPECT_EQ(layout.low_latency.bytes, 0u);
  EXPECT_EQ(layout.window_at(), layout.control.bytes());
  EXPECT_EQ(layout.window_bytes, kMiB) << "whole lines";
}

TEST(HeapLayout, TooLittleIsRefused) {
  EXPECT_THROW(HeapLayout::make({.heap_bytes = kMiB, .window_bytes = 2 * kMiB}, 2), OutOfMemory);
  EXPECT_THROW(HeapLayout::make({.heap_bytes = kMiB, .window_bytes = kMiB}, 2), OutOfMemory) << "signals take some";
  EXPECT_THROW(HeapLayout::make({.heap_bytes = 64 * kMiB, .low_latency = {.bytes = 4096}}, 8), InvalidArgument);
}

}  // namespace
}  // namespace deep_ep
