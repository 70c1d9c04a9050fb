// Arguments of the second interface's dispatch among ranks of one node. Plain data: host code fills it, kernels read
// it. deep_ep/elastic.hpp describes the tensors.
#pragma once

#include <cstdint>

#include "kernels/normal/params.hpp"
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

}  // namespace deep_ep
