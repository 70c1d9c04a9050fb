#include "tools/bench/check.hpp"

#include <fmt/format.h>

#include <cstring>
#include <vector>

#include "tools/common/number_formats.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

/// Compares received rows with `fill(source, token, row)`. Row by row, as the data may be larger than the host likes.
template <class T, class Fill>
void check_rows(const char* what, const std::vector<T>& received, std::size_t width, const WorkloadShape& shape,
                const Routes& routes, int rank, Fill&& fill) {
  const auto expected_rows = static_cast<std::size_t>(routes.received(rank));
  if (received.size() != expected_rows * width) {
    throw Error(
        fmt::format("check: rank {} received {} {}, expected {}", rank, received.size() / width, what, expected_rows));
  }
  std::vector<T> expected(width);
  std::size_t row = 0;
  for (int source = 0; source < shape.ranks; ++source) {
    for (std::int64_t token = 0; token < shape.tokens; ++token) {
      if (!routes.sends(source, token, rank)) continue;
      fill(source, token, std::span(expected));
      if (std::memcmp(received.data() + row * width, expected.data(), width * sizeof(T)) != 0) {
        throw Error(fmt::format("check: row {} of the {} of rank {} is not token {} of rank {}", row, what, rank, token,
                                source));
      }
      ++row;
    }
  }
}

template <class T>
std::vector<T> to_host(Executor& executor, const TensorView& tensor, StreamHandle stream) {
  std::vector<T> values(tensor.bytes() / sizeof(T));
  download(executor, tensor, values.data(), stream);
  return values;
}

}  // namespace

void check_dispatched_bf16(Executor& executor, StreamHandle stream, const WorkloadShape& shape, const Routes& routes,
                           int rank, const DispatchResult& result) {
  const auto rows = to_host<std::uint16_t>(executor, result.recv_x.view(), stream);
  check_rows("BF16 rows", rows, static_cast<std::size_t>(shape.hidden), shape, routes, rank,
             [&](int source, std::int64_t token, std::span<std::uint16_t> row) { fill_row_bf16(source, token, row); });
}

void check_dispatched_8bit(Executor& executor, StreamHandle stream, const WorkloadShape& shape, const Routes& routes,
                           int rank, const DispatchResult& result) {
  const auto rows = to_host<std::uint8_t>(executor, result.recv_x.view(), stream);
  check_rows("8-bit rows", rows, static_cast<std::size_t>(shape.hidden), shape, routes, rank,
             [&](int source, std::int64_t token, std::span<std::uint8_t> row) { fill_row_8bit(source, token, row); });
  const auto scales = to_host<float>(executor, result.recv_x_scales->view(), stream);
  check_rows("scales", scales, static_cast<std::size_t>(shape.scales()), shape, routes, rank,
             [&](int source, std::int64_t token, std::span<float> row) { fill_scales(source, token, row); });
}

void check_combined(Executor& executor, StreamHandle stream, const WorkloadShape& shape, const Routes& routes, int rank,
                    const CombineResult& result) {
  const auto sums = to_host<std::uint16_t>(executor, result.combined_x.view(), stream);
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  std::vector<std::uint16_t> row(hidden);
  for (std::int64_t token = 0; token < shape.tokens; ++token) {
    fill_row_bf16(rank, token, row);
    const auto times = static_cast<float>(routes.fan_out(rank, token));
    for (std::size_t h = 0; h < hidden; ++h) {
      // Whole numbers below 2^24: the sum is exact before it is rounded to BF16. A sum may be -0 or +0.
      const float expected = bf16_to_float(float_to_bf16(times * bf16_to_float(row[h])));
      const float sum = bf16_to_float(sums[static_cast<std::size_t>(token) * hidden + h]);
      if (sum != expected) {
        throw Error(fmt::format("check: combined token {} of rank {}, channel {}: {}, expected {}", token, rank, h, sum,
                                expected));
      }
    }
  }
}

}  // namespace deep_ep::tools
