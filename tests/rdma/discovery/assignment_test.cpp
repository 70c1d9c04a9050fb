#include "csrc/rdma/discovery/nic_map.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>

namespace deep_ep::rdma {
namespace {

using Costs = std::vector<std::vector<std::int64_t>>;

std::int64_t total(const Costs& cost, const std::vector<std::size_t>& columns) {
  std::int64_t sum = 0;
  for (std::size_t row = 0; row < cost.size(); ++row) sum += cost[row][columns[row]];
  return sum;
}

// Every order of columns, of which the first rows count.
std::int64_t cheapest_by_trying(const Costs& cost) {
  std::vector<std::size_t> columns(cost.front().size());
  std::iota(columns.begin(), columns.end(), 0);
  std::int64_t best = total(cost, columns);
  while (std::next_permutation(columns.begin(), columns.end())) best = std::min(best, total(cost, columns));
  return best;
}

TEST(Assignment, MoreRowsThanColumnsIsAMistakeOfTheCaller) {
  EXPECT_THROW(cheapest_assignment({{1}, {2}}), std::logic_error);
}

TEST(Assignment, OfEqualColumnsTheFirstAreTaken) {
  EXPECT_EQ(cheapest_assignment({{1, 1, 1}, {1, 1, 1}}), (std::vector<std::size_t>{0, 1}));
  EXPECT_EQ(cheapest_assignment({{2, 1, 1, 1}, {1, 2, 2, 1}}), (std::vector<std::size_t>{1, 0}));
  EXPECT_EQ(cheapest_assignment({{1, 1}, {1, 2}}), (std::vector<std::size_t>{1, 0})) << "unless that costs more";
}

TEST(Assignment, IsAsCheapAsTryingAll) {
  constexpr std::uint64_t kSeed = 20261121;
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 300; ++round) {
    const std::size_t rows = 1 + random() % 6;
    const std::size_t columns = rows + random() % (8 - rows);
    Costs cost(rows, std::vector<std::int64_t>(columns));
    // Few values, so that ties are common; every third round large ones.
    for (auto& row : cost) {
      for (auto& value : row) value = static_cast<std::int64_t>(random() % (round % 3 == 0 ? 1'000'000'007 : 4));
    }
    const auto chosen = cheapest_assignment(cost);
    ASSERT_EQ(std::set<std::size_t>(chosen.begin(), chosen.end()).size(), rows) << "seed " << kSeed << ", " << round;
    ASSERT_EQ(total(cost, chosen), cheapest_by_trying(cost)) << "seed " << kSeed << ", round " << round;
  }
}

}  // namespace
}  // namespace deep_ep::rdma
