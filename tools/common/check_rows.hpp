// Compares the rows of a rank with the oracle's. Each function throws Error at the first difference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "csrc/support/format.hpp"
#include "oracle/bf16.hpp"
#include "oracle/normal.hpp"

namespace deep_ep::tools {

/// Compares rows of `width` values with `fill(source, token, row)`, row by row: the data of all ranks may be too large
/// for the host.
template <class T, class Fill>
void check_rows(const oracle::Received& expected, int rank, const char* what, const std::vector<T>& received,
                std::size_t width, Fill&& fill) {
  const auto rows = static_cast<std::size_t>(expected.rows);
  if (received.size() != rows * width) {
    deep_ep::fail<Error>("check: rank {} received {} {}, expected {}", rank, received.size() / width, what, rows);
  }
  std::vector<T> row(width);
  for (std::size_t i = 0; i < rows; ++i) {
    fill(expected.src_rank[i], expected.src_idx[i], std::span<T>(row));
    if (std::memcmp(received.data() + i * width, row.data(), width * sizeof(T)) == 0) continue;
    deep_ep::fail<Error>("check: row {} of the {} of rank {} is not token {} of rank {}", i, what, rank,
                         expected.src_idx[i], expected.src_rank[i]);
  }
}

/// The selections of the rows, as far as the oracle has any.
inline void check_selection(const oracle::Received& expected, int rank, std::span<const std::int64_t> local_experts,
                            std::span<const float> weights) {
  if (std::ranges::equal(local_experts, expected.topk_idx) && std::ranges::equal(weights, expected.topk_weights))
    return;
  fail<Error>("check: the selections that rank {} received are not those sent", rank);
}

inline void check_counts(const oracle::Received& expected, int rank, const std::vector<int>& rows_of_experts) {
  if (rows_of_experts == expected.tokens_per_expert) return;
  fail<Error>("check: rows of the experts of rank {}: {}, expected {}", rank, fmt::join(rows_of_experts, ","),
              fmt::join(expected.tokens_per_expert, ","));
}

/// Compares the sums of a rank's tokens, [tokens, hidden] bfloat16, with `right(token)`: bit for bit, but for the sign
/// of 0, or, unless they must be `exact`, by what rounding explains. @returns the largest difference relative to that.
template <class Right>
double check_sums(int rank, std::int64_t tokens, std::int64_t hidden, std::span<const std::uint16_t> sums, bool exact,
                  Right&& right) {
  const auto width = static_cast<std::size_t>(hidden), values = static_cast<std::size_t>(tokens) * width;
  if (sums.size() != values) fail<Error>("check: sums of rank {}: {} values, expected {}", rank, sums.size(), values);
  double largest = 0;
  for (std::int64_t token = 0; token < tokens; ++token) {
    const oracle::Combined expected = right(token);
    for (std::size_t h = 0; h < width; ++h) {
      const float seen = oracle::bf16_value(sums[static_cast<std::size_t>(token) * width + h]);
      const double of_bound = std::fabs(static_cast<double>(seen) - expected.sum[h]) / expected.tolerance[h];
      largest = std::max(largest, of_bound);
      if (exact ? seen == oracle::bf16_value(expected.x[h]) : of_bound <= 1) continue;
      fail<Error>("check: sum of rank {}, token {}, channel {}: {}, expected {}", rank, token, h, seen,
                  exact ? static_cast<double>(oracle::bf16_value(expected.x[h])) : expected.sum[h]);
    }
  }
  return largest;
}

}  // namespace deep_ep::tools
