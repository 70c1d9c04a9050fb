// Arguments of the kernels of the second interface, among ranks of one node. Plain data: host code fills it, kernels
// read it. deep_ep/elastic.hpp describes the tensors.
#pragma once

#include <cstdint>

#include "kernels/common/rows.hpp"
#include "kernels/normal/node.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep {

/// In a fresh dispatch a source tells every rank its selections before its rows come. Many selections lie in the
/// window, whose owner has read them before it announces its next call, and a signal follows them. Few are told in
/// cells, and nothing follows them. These lie in memory of their own, so the source tells them before ranks have met;
/// it may be one call ahead there, never two.
struct ToldSelections {
  static constexpr int kOfCell = 4;  ///< selections, of 16 bits each: as far apart as those of 32 bits

  std::uint64_t selections_at;  ///< offset in the heap
  /// From a source's selections to the next one's, multiple of 4. Few are told before it is known that ranks agree, so
  /// it is then the same for all calls.
  std::int64_t stride;
  std::uint64_t turn_bytes;  ///< from those of an even call to those of an odd one; 0: in the window

  DEEP_EP_DEVICE bool apart() const { return turn_bytes != 0; }
  /// [num_tokens, num_topk]: experts, -1 for none.
  DEEP_EP_DEVICE std::int32_t* of(std::byte* heap, int source, std::uint64_t epoch) const {
    return reinterpret_cast<std::int32_t*>(heap + selections_at + (epoch & 1) * turn_bytes) + source * stride;
  }
};

struct ElasticDispatchParams : SentRows {
  IntranodeParams common;
  bool fresh;               ///< selections are told and numbered
  CallShape shape;          ///< fresh: must agree
  HostCounts* host_counts;  ///< out, fresh: nullptr when the host does not wait
  TokenWindow window;
  ToldSelections told;
  NumberingParams numbers;
  int first_sender;  ///< 1, or 0 where the block that tells sends, too
  Divisor sending_blocks;
  int sending_warps;  ///< of each, the first ones
  PipeShape pipe;     ///< of a sending warp, in shared memory
};

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
