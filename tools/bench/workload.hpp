// The data of a benchmark. Every value follows from (rank, token, position), so that a rank can work out by itself what
// its peers send.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oracle/normal.hpp"

namespace deep_ep::tools {

struct WorkloadShape {
  int ranks = 8;
  std::int64_t tokens = 4096;  ///< of each rank
  int hidden = 7168;
  int topk = 8;
  int experts = 256;
  int nodes = 1;   ///< of equally many ranks
  int groups = 0;  ///< nodes that a token's experts may be on, 0 = all

  int ranks_per_node() const { return ranks / nodes; }
  int local_experts() const { return experts / ranks; }
  int scales() const { return (hidden + 127) / 128; }  ///< float32 scales of an 8-bit row
  std::int64_t row_bytes_8bit() const { return hidden + std::int64_t{scales()} * 4; }
  std::int64_t row_bytes_bf16() const { return std::int64_t{hidden} * 2; }
};

/// InvalidArgument, in terms of the command line, when `ranks` ranks cannot share the experts, or `nodes` nodes, or
/// when `groups` of them have too few.
void check_workload(int ranks, int topk, int experts, int nodes, int groups);

/// [tokens, topk] distinct experts of each token, uniformly random (those of `groups` nodes, which are, too), and their
/// weights.
std::vector<std::int64_t> make_selection(const WorkloadShape& shape, int rank);
std::vector<float> make_weights(const WorkloadShape& shape, int rank);

/// The rows of `rank`. Values of BF16 rows are small whole numbers, so that sums of a few are exact in fp32.
void fill_row_bf16(int rank, std::int64_t token, std::span<std::uint16_t> row);
void fill_row_8bit(int rank, std::int64_t token, std::span<std::uint8_t> row);
void fill_scales(int rank, std::int64_t token, std::span<float> row);

/// [tokens, width] values of `rank`, row by row as `fill` makes them.
template <class T, class Fill>
std::vector<T> filled_rows(const WorkloadShape& shape, int rank, std::int64_t width, const Fill& fill) {
  std::vector<T> rows(static_cast<std::size_t>(shape.tokens * width));
  for (std::int64_t token = 0; token < shape.tokens; ++token) {
    fill(rank, token,
         std::span(rows).subspan(static_cast<std::size_t>(token * width), static_cast<std::size_t>(width)));
  }
  return rows;
}

/// The tokens that each rank sends to each other one.
class Routes {
 public:
  explicit Routes(const WorkloadShape& shape, bool with_selections = false);

  /// Rows from `source` to `destination`.
  std::int64_t rows(int source, int destination) const;
  std::int64_t total() const;
  std::int64_t total_between_ranks() const;
  /// Which rows a rank receives, without their bytes; with their selections where those are asked for.
  const oracle::Received& received_by(int rank) const { return dispatched_.received[static_cast<std::size_t>(rank)]; }
  /// On how many ranks of a node the token has experts.
  int fan_out(int source, std::int64_t token, int node) const;

  /// Rows on their way, of all ranks.
  struct Crossings {
    std::int64_t over_nvlink = 0;    ///< between ranks of a node: from the source, or from its rail in another node
    std::int64_t between_nodes = 0;  ///< one for each token and other node with experts of it
    std::int64_t to_nodes = 0;       ///< the same with the own node, as upstream's test counts
  };
  Crossings crossings() const;

 private:
  /// The token's rows on the ranks of a node, -1 where it has none.
  std::span<const std::int32_t> rows_on_node(int source, std::int64_t token, int node) const;

  WorkloadShape shape_;
  oracle::Dispatched dispatched_;
};

}  // namespace deep_ep::tools
