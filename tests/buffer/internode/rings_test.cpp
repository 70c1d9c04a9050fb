// How the window is shared out between rings, and these between rows.
#include "kernels/internode/rings.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>

#include "tests/support/bytes.hpp"

namespace deep_ep {
namespace {

using test::kMiB;

TEST(RingsTest, ChunksLieWithinTheirRing) {
  for (const std::size_t bytes : {4 * kMiB, 96 * kMiB, 1024 * kMiB, 16384 * kMiB}) {
    for (const int others : {1, 3, 127}) {
      for (const std::size_t row : {std::size_t{16}, std::size_t{14464}, kMiB, 100 * kMiB}) {
        SCOPED_TRACE(testing::Message() << bytes << " bytes, " << others << " other nodes, rows of " << row);
        const Rings rings = Rings::make(0, bytes, others, row);
        if (rings.chunks == 0) {
          EXPECT_LT(rings.ring_bytes, 2 * row + 2 * kLine);
          continue;
        }
        EXPECT_GE(rings.chunks, 2);
        EXPECT_LE(rings.chunks, Rings::kMostChunks);
        EXPECT_GE(rings.slot_bytes, row);
        const std::size_t chunk_bytes = std::size_t{rings.slot_bytes} * static_cast<std::size_t>(rings.chunk_rows);
        EXPECT_LE(chunk_bytes, Rings::kMostBytes);
        EXPECT_LE(chunk_bytes * static_cast<std::size_t>(rings.chunks), rings.ring_bytes);
        const int last_row = rings.chunks * rings.chunk_rows - 1;
        EXPECT_LE(rings.staging(others - 1, last_row).offset + rings.slot_bytes, bytes);
        EXPECT_EQ(rings.landing(0, last_row + 1).offset, rings.landing(0, 0).offset);
      }
    }
  }
}

/// A chunk takes the place of one of its own lane, and every chunk is of one lane.
TEST(RingsTest, LanesShareARingEqually) {
  for (const int lanes : {2, 4}) {
    for (std::size_t rows = 2; rows < 5000; rows = rows * 3 / 2) {
      SCOPED_TRACE(testing::Message() << lanes << " lanes, rings of " << rows << " rows");
      const Rings one = Rings::make(0, 2 * rows * kLine, 1, kLine);
      const Rings rings = Rings::make(0, 2 * rows * kLine, 1, kLine, lanes);
      ASSERT_TRUE(rings.lanes == 1 || rings.chunks >= 2 * rings.lanes);
      EXPECT_TRUE(rings.lanes == lanes || one.chunks < 2 * lanes);
      EXPECT_EQ(rings.chunks % rings.lanes, 0);
      EXPECT_GT(rings.chunks + rings.lanes, one.chunks);
      for (const int sent : {0, 1, 40, 1000}) {
        int chunks = 0;
        for (int lane = 0; lane < lanes; ++lane) {
          const int of_lane = rings.chunks_for(sent, lane);
          for (int at = 0; at < of_lane; ++at) {
            const int chunk = rings.chunk_in(lane, at);
            EXPECT_EQ(rings.lane_of(chunk), lane);
            EXPECT_EQ(rings.in_lane(chunk), at);
            EXPECT_LT(chunk, rings.chunks_for(sent));
          }
          chunks += of_lane;
        }
        EXPECT_EQ(chunks, rings.chunks_for(sent));
      }
    }
  }
}

}  // namespace
}  // namespace deep_ep
