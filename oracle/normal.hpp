// The right results of layout, dispatch and combine of normal mode, for all ranks at once, in plain code. The oracle
// shares nothing with the library: it has its own types and number formats, so that a mistake there cannot hide here.
//
// Inputs without payload (row_bytes and scales_per_row 0) give the routes alone: which row comes from where, and how
// many. A test that cannot hold the data of all ranks at once compares row by row with the token of `src_rank` and
// `src_idx`, and sums with `combine_row`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "oracle/bf16.hpp"

namespace deep_ep::oracle {

/// The experts that the tokens of one rank chose.
struct Selection {
  std::int64_t tokens = 0;
  int topk = 0;                   ///< 0: no top-k tensors
  std::vector<std::int64_t> idx;  ///< [tokens, topk]; anything outside [0, experts) selects nothing
  std::vector<float> weights;     ///< [tokens, topk]
};

struct Layout {
  std::vector<std::int32_t> tokens_per_rank;    ///< [ranks]
  std::vector<std::int32_t> tokens_per_expert;  ///< [experts]
  std::vector<std::uint8_t> token_in_rank;      ///< [tokens, ranks]
};

Layout layout(const Selection& selection, int ranks, int experts);

/// One rank's arguments of dispatch.
struct DispatchInput {
  std::int64_t tokens = 0;
  std::size_t row_bytes = 0;
  std::vector<std::byte> x;  ///< [tokens, row_bytes]
  int scales_per_row = 0;
  std::vector<std::uint32_t> scales;  ///< [tokens, scales_per_row]: the bits, whatever the type and the strides
  Selection selection;                ///< topk == 0: none given
  Layout layout;                      ///< `token_in_rank` alone decides where rows go
};

/// One rank's results of dispatch: by source rank, then by token index at the source.
struct Received {
  std::int64_t rows = 0;
  std::vector<std::byte> x;            ///< [rows, row_bytes]
  std::vector<std::uint32_t> scales;   ///< [rows, scales_per_row]
  std::vector<std::int64_t> topk_idx;  ///< [rows, topk]: index among the rank's own experts, or -1
  std::vector<float> topk_weights;     ///< [rows, topk]: 0 where the index is -1
  std::vector<std::int32_t> src_rank;  ///< [rows]
  std::vector<std::int32_t> src_idx;   ///< [rows]: token index at the source
  std::vector<int> tokens_per_expert;  ///< [experts / ranks], aligned
};

struct Dispatched {
  std::vector<Received> received;                          ///< one per rank
  std::vector<std::int32_t> rank_prefix_matrix;            ///< [ranks, ranks]: end row of source s at destination d
  std::vector<std::vector<std::int32_t>> destination_row;  ///< one a source rank: [tokens, ranks], -1 = not sent
};

Dispatched dispatch(std::span<const DispatchInput> inputs, int experts, int expert_alignment);

/// One rank's arguments of combine. Rows are bfloat16 bits.
struct CombineInput {
  std::vector<std::uint16_t> x;               ///< [rows, hidden]
  std::vector<float> topk_weights;            ///< [rows, topk] or empty
  std::vector<std::uint16_t> bias_0, bias_1;  ///< [tokens, hidden] or empty
};

/// Rows of tokens, one after the other.
struct Combined {
  std::vector<std::uint16_t> x;     ///< [tokens, hidden] bfloat16 bits, rounded as combine says; exact bits
  std::vector<double> sum;          ///< [tokens, hidden]: the same sum in double precision, without roundings
  std::vector<double> tolerance;    ///< [tokens, hidden]: how far a result may be from `sum` by the roundings
  std::vector<float> topk_weights;  ///< of normal mode: [tokens, topk] or empty

  /// Those behind these, but for the weights.
  void append(const Combined& rows);
};

/// `topk`: of the weights that come back, 0 = none do. `ranks_per_node`: 0 = all ranks are of one node. Otherwise what
/// another node holds of a token is added up first, in rank order and rounded to bfloat16 (weights: in fp32), and comes
/// in at the place of the node, as one row; rows of the owner's node come in one by one.
std::vector<Combined> combine(const Dispatched& dispatched, std::span<const CombineInput> inputs, std::int64_t hidden,
                              int topk, int ranks_per_node = 0);

/// bfloat16 bits of one row, or none.
using Row = std::span<const std::uint16_t>;
/// A row that comes back, and its weight.
struct WeightedRow {
  Row x;  ///< [hidden]
  float weight = 1;
};

/// One token's row at rank `owner`, of both modes: first the biases (empty: none), then the parts of the ranks, in
/// fp32, ranks ascending, rounded at the end. rows_of_ranks[r]: what rank r adds up in fp32 and rounds, in this order;
/// where there is none, r has no part in the sum. `ranks_per_node`: 0 = the parts are added one by one. Otherwise so
/// many consecutive ranks make a node, and what comes of another node's ranks is added up first, and rounded; it
/// divides the number of ranks.
Combined combine_row(int owner, std::span<const std::vector<WeightedRow>> rows_of_ranks, std::int64_t hidden,
                     int ranks_per_node = 0, std::span<const Row> biases = {});

}  // namespace deep_ep::oracle
