#include "tools/bench/check.hpp"

#include <fmt/format.h>

#include <vector>

#include "deep_ep/error.hpp"
#include "tools/common/check_rows.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

template <class T>
std::vector<T> to_host(const CheckedRank& rank, const TensorView& tensor) {
  return tools::to_host<T>(rank.executor, tensor, rank.stream);
}

template <class T, class Fill>
void check_rows(const CheckedRank& rank, const char* what, const TensorView& tensor, std::size_t width, Fill&& fill) {
  tools::check_rows(rank.routes.received_by(rank.rank), rank.rank, what, to_host<T>(rank, tensor), width, fill);
}

}  // namespace

void check_dispatched_bf16(const CheckedRank& rank, const CachedDispatchResult& result) {
  check_rows<std::uint16_t>(rank, "BF16 rows", result.recv_x.view(), static_cast<std::size_t>(rank.shape.hidden),
                            fill_row_bf16);
}

void check_dispatched_8bit(const CheckedRank& rank, const CachedDispatchResult& result) {
  check_rows<std::uint8_t>(rank, "8-bit rows", result.recv_x.view(), static_cast<std::size_t>(rank.shape.hidden),
                           fill_row_8bit);
  check_rows<float>(rank, "scales", result.recv_x_scales->view(), static_cast<std::size_t>(rank.shape.scales()),
                    fill_scales);
}

void check_combined(const CheckedRank& rank, const CombineResult& result) {
  const auto sums = to_host<std::uint16_t>(rank, result.combined_x.view());
  const auto hidden = static_cast<std::size_t>(rank.shape.hidden);
  std::vector<std::uint16_t> row(hidden);
  for (std::int64_t token = 0; token < rank.shape.tokens; ++token) {
    fill_row_bf16(rank.rank, token, row);
    std::vector<oracle::Row> rows;
    std::vector<oracle::CombinedRow> of_nodes;  // sums of other nodes, each of which comes back as one row
    of_nodes.reserve(static_cast<std::size_t>(rank.shape.nodes));
    for (int node = 0; node < rank.shape.nodes; ++node) {
      const auto count = static_cast<std::size_t>(rank.routes.fan_out(rank.rank, token, node));
      if (node == rank.rank / rank.shape.ranks_per_node()) {
        rows.insert(rows.end(), count, row);
      } else if (count != 0) {
        of_nodes.push_back(oracle::combine_row(std::vector<oracle::Row>(count, row), rank.shape.hidden));
        rows.emplace_back(of_nodes.back().x);
      }
    }
    const oracle::CombinedRow expected = oracle::combine_row(rows, rank.shape.hidden);
    for (std::size_t h = 0; h < hidden; ++h) {
      const float sum = oracle::bf16_value(sums[static_cast<std::size_t>(token) * hidden + h]);
      const float right = oracle::bf16_value(expected.x[h]);
      if (sum == right) continue;  // a sum may be -0 or +0
      throw Error(fmt::format("check: combined token {} of rank {}, channel {}: {}, expected {}", token, rank.rank, h,
                              sum, right));
    }
  }
}

}  // namespace deep_ep::tools
