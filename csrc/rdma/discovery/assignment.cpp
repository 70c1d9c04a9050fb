#include "csrc/rdma/discovery/assignment.hpp"

#include <limits>
#include <stdexcept>
#include <utility>

namespace deep_ep::rdma {
namespace {

constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max() / 4;

// Rows are added one at a time; each finds the cheapest chain of changes that frees a column (shortest augmenting path,
// Dijkstra over reduced costs). The last column and the last row are sentinels.
class Matcher {
 public:
  explicit Matcher(const std::vector<std::vector<std::int64_t>>& cost)
      : cost_(cost),
        rows_(cost.size()),
        columns_(cost.empty() ? 0 : cost.front().size()),
        row_potential_(rows_ + 1),
        column_potential_(columns_ + 1),
        row_of_(columns_ + 1, rows_) {
    if (columns_ < rows_) throw std::logic_error("an assignment needs at least as many columns as rows");
  }

  std::vector<std::size_t> solve() {
    for (std::size_t row = 0; row < rows_; ++row) add(row);
    std::vector<std::size_t> column_of(rows_);
    for (std::size_t column = 0; column < columns_; ++column) {
      if (row_of_[column] != rows_) column_of[row_of_[column]] = column;
    }
    return column_of;
  }

 private:
  void add(std::size_t row) {
    std::vector<std::int64_t> distance(columns_, kFar);
    std::vector<std::size_t> from(columns_, columns_);
    std::vector<bool> reached(columns_ + 1, false);
    std::size_t column = columns_;
    row_of_[column] = row;
    while (row_of_[column] != rows_) {
      reached[column] = true;
      const std::size_t next = relax(row_of_[column], column, reached, distance, from);
      shift(distance[next], reached, distance);
      column = next;
    }
    // Back along the path: every column takes the row of the column before it.
    while (column != columns_) {
      row_of_[column] = row_of_[from[column]];
      column = from[column];
    }
    row_of_[columns_] = rows_;
  }

  std::size_t relax(std::size_t row, std::size_t column, const std::vector<bool>& reached,
                    std::vector<std::int64_t>& distance, std::vector<std::size_t>& from) const {
    std::size_t nearest = columns_;
    for (std::size_t other = 0; other < columns_; ++other) {
      if (reached[other]) continue;
      const std::int64_t reduced = cost_[row][other] - row_potential_[row] - column_potential_[other];
      if (reduced < distance[other]) {
        distance[other] = reduced;
        from[other] = column;
      }
      if (nearest == columns_ || distance[other] < distance[nearest]) nearest = other;
    }
    return nearest;
  }

  void shift(std::int64_t by, const std::vector<bool>& reached, std::vector<std::int64_t>& distance) {
    for (std::size_t column = 0; column <= columns_; ++column) {
      if (reached[column]) {
        row_potential_[row_of_[column]] += by;
        column_potential_[column] -= by;
      } else if (column < columns_) {
        distance[column] -= by;
      }
    }
  }

  const std::vector<std::vector<std::int64_t>>& cost_;
  std::size_t rows_;
  std::size_t columns_;
  std::vector<std::int64_t> row_potential_;
  std::vector<std::int64_t> column_potential_;
  std::vector<std::size_t> row_of_;  // rows_: free
};

}  // namespace

std::vector<std::size_t> cheapest_assignment(const std::vector<std::vector<std::int64_t>>& cost) {
  return Matcher(cost).solve();
}

}  // namespace deep_ep::rdma
