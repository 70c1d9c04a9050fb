// The assignment problem.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deep_ep::rdma {

/// The cheapest way to give every row a column of its own: result[row] = column. `cost[row][column]`, all rows of one
/// length, at least as many columns as rows. Hungarian method with potentials: O(rows² · columns).
std::vector<std::size_t> cheapest_assignment(const std::vector<std::vector<std::int64_t>>& cost);

}  // namespace deep_ep::rdma
