// The places of rows in local rings.
#include "kernels/normal/rings.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <set>

namespace deep_ep {
namespace {

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
