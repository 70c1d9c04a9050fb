// How lanes share a ring.
#include "kernels/internode/params.hpp"

#include <gtest/gtest.h>

#include <cstddef>

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

}  // namespace
}  // namespace deep_ep
