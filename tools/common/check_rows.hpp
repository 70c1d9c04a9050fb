// Received rows against the oracle's.
#pragma once

#include <fmt/format.h>

#include <cstring>
#include <span>
#include <vector>

#include "deep_ep/error.hpp"
#include "oracle/normal.hpp"

namespace deep_ep::tools {

/// Compares rows of `width` values with `fill(source, token, row)`, row by row: the data of all ranks may be too large
/// for the host. @throws Error at the first difference.
template <class T, class Fill>
void check_rows(const oracle::Received& expected, int rank, const char* what, const std::vector<T>& received,
                std::size_t width, Fill&& fill) {
  const auto rows = static_cast<std::size_t>(expected.rows);
  if (received.size() != rows * width) {
    throw Error(fmt::format("check: rank {} received {} {}, expected {}", rank, received.size() / width, what, rows));
  }
  std::vector<T> row(width);
  for (std::size_t i = 0; i < rows; ++i) {
    fill(expected.src_rank[i], expected.src_idx[i], std::span<T>(row));
    if (std::memcmp(received.data() + i * width, row.data(), width * sizeof(T)) == 0) continue;
    throw Error(fmt::format("check: row {} of the {} of rank {} is not token {} of rank {}", i, what, rank,
                            expected.src_idx[i], expected.src_rank[i]));
  }
}

}  // namespace deep_ep::tools
