// How lanes share a ring, and what lies where in local rings.
#include "kernels/normal/rings.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <set>

namespace deep_ep {
namespace {

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

/// Rings share neither slots nor words, and all lie within their bounds.
TEST(LocalRingsTest, RingsAreApart) {
  constexpr int kRanks = 6;
  const RingWords words{{0}, {kRanks * 100 * sizeof(std::uint64_t)}, 100};
  for (const int rings : {2, 3, kRanks}) {
    for (const std::size_t rows : {1, 30, 70, 5000}) {
      SCOPED_TRACE(testing::Message() << rings << " rings with room for " << rows << " rows each");
      const std::size_t bytes = rows * static_cast<std::size_t>(rings) * 2 * kLine;
      const LocalRings local =
          LocalRings::make(64, bytes, rings, kRanks, 2 * kLine, words, Wanted::combine_rows, Wanted::combine_credit);
      ASSERT_GE(local.slots, 1);
      std::set<std::size_t> slots;
      for (int ring = 0; ring < rings; ++ring) {
        for (int n = 0; n < local.slots; ++n) {
          EXPECT_LT(local.slot_of(ring, n), kRanks * words.slots);
          const std::size_t at = local.slot(ring, n).offset;
          EXPECT_TRUE(slots.insert(at).second);
          EXPECT_LE(at + 2 * kLine, 64 + bytes);
          EXPECT_EQ(local.slot(ring, n + local.slots).offset, at);
        }
      }
    }
  }
}

}  // namespace
}  // namespace deep_ep
