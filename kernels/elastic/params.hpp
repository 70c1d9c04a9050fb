// Arguments of the kernels of the second interface, among ranks of one node. Plain data: host code fills it, kernels
// read it. deep_ep/elastic.hpp describes the tensors.
#pragma once

#include <cstdint>

#include "kernels/normal/params.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep {

struct ElasticCombineShared {
  static constexpr int kMostShared = 8;  ///< rows that the warps of a block, 16 at most, share, two or more each

  Carver carver;
  int num_ranks;
  std::int32_t* source_ends = carver.take<std::int32_t>(num_ranks);  ///< of rows that the metadata has
  std::uint32_t* arrived = carver.take<std::uint32_t>(kMostShared);  ///< warps that have stored their share of a row
  std::size_t bytes = carver.bytes();
};

struct ElasticCombineParams {
  IntranodeParams common;
  Divisor num_topk;
  Divisor num_local_experts;
  Divisor others;  ///< ranks
  std::uint32_t row_bytes;
  bool expanded;        ///< rows of x are those that the metadata names; else x has a row for each one of the metadata
  bool each_selection;  ///< the owner adds the row of each selection; else a rank adds its own first. Only if expanded
  bool weighted;

  // As owner.
  TopkIndices topk_idx;          ///< [num_tokens, num_topk]
  const std::int32_t* own_rows;  ///< [num_tokens, num_topk]
  std::int32_t num_tokens;
  const std::byte* bias[2];  ///< nullptr: none
  std::byte* combined_x;     ///< out, [num_tokens] rows
  float* combined_weights;   ///< out, [num_tokens, num_topk]

  // As expert side.
  const std::byte* x;
  std::int64_t num_rows;  ///< of x
  RowMetadata metadata;
  const std::int32_t* source_ends;  ///< [num_ranks]
  const float* weights;             ///< [num_rows], or, not expanded, [num_rows, num_topk]

  TokenWindow window;
  int pushing_blocks;       ///< the first ones; the others only add, which touches no other device
  int adding_warps;         ///< of a pushing block, from the beginning; the others push first
  Divisor parts_per_token;  ///< a token is added in so many parts, by different warps

  /// The part in which a token's row from `source` lies: the number of the source or of its last selection, whichever
  /// has fewer values.
  DEEP_EP_DEVICE int part_of(int source, int last_selection) const {
    return window.parts == common.num_ranks ? source : last_selection;
  }
};

}  // namespace deep_ep
