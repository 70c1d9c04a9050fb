// Arguments of the second interface's dispatch among ranks of one node. Plain data: host code fills it, kernels read
// it. deep_ep/elastic.hpp describes the tensors.
#pragma once

#include <cstdint>

#include "kernels/normal/params.hpp"
#include "kernels/rows/landing.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep {

/// What a source tells every rank of a fresh dispatch, before its rows come. It lies in the window, whose owner has
/// read it before it announces its next call.
struct ToldSelections {
  std::uint64_t shapes_at, selections_at;  ///< offsets in the heap
  std::int64_t stride;                     ///< from a source's selections to the next one's, multiple of 4

  struct alignas(kLine) Shape : CallShape {};
  DEEP_EP_DEVICE Shape& shape(std::byte* heap, int source) const {
    return reinterpret_cast<Shape*>(heap + shapes_at)[source];
  }
  /// [num_tokens, num_topk]: experts, -1 for none.
  DEEP_EP_DEVICE std::int32_t* of(std::byte* heap, int source) const {
    return reinterpret_cast<std::int32_t*>(heap + selections_at) + source * stride;
  }
};

/// What the blocks that number selections find out.
struct DispatchNumbers : RowTables {
  CountExchange exchange;  ///< one block needs none
  bool clear_tail;         ///< rows behind the last one say that they hold nothing
  int blocks;              ///< the last ones of the grid
  int warps;               ///< of each of these blocks, for which shared memory has room
  int staged;              ///< selections of a block for which shared memory has room, too
  std::uint32_t shared_at;

  /// Counters: rows for each rank, selections of each local expert, rows of this rank from each source.
  DEEP_EP_HOST_DEVICE static int columns(int num_ranks, int num_local_experts) {
    return 2 * num_ranks + num_local_experts;
  }
};

struct ElasticDispatchParams : SentRows {
  IntranodeParams common;
  WaitContext wait;
  NotifyCall call;  ///< fresh: what must agree, and what the host is told
  bool fresh;       ///< selections are told and numbered
  bool weighted;
  std::uint8_t* sent_to;  ///< [num_tokens, num_ranks]: does the token's row go there? Out if selections say it
  LandingWindow window;
  ToldSelections told;
  DispatchNumbers numbers;
  int telling_blocks;  ///< the first ones of the grid
  int first_sender;    ///< telling_blocks, or 0 where those send, too
  int sending_blocks;
  int sending_warps;  ///< of each, the first ones

  // Pipeline of a sending warp, in shared memory.
  std::uint32_t stage_bytes;  ///< multiple of 128
  int stages;                 ///< 2..8

  /// Do selections say where rows go? So in each pass of a dispatch whose first one is fresh.
  DEEP_EP_DEVICE bool selects() const { return topk_idx.data != nullptr; }
  /// Behind the last token of this rank in the pass.
  DEEP_EP_DEVICE std::int32_t end_of_pass() const {
    const std::int64_t end = std::int64_t{window.first_token} + window.tokens;
    return end < num_tokens ? static_cast<std::int32_t>(end) : num_tokens;
  }
};

/// Shared memory of a block: a word, and the pipelines of its warps.
struct ElasticDispatchShared {
  std::int32_t* scratch;
  device::Mbarrier* barriers;  ///< [warps * stages]
  std::byte* stages;           ///< [warps * stages] of stage_bytes
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE ElasticDispatchShared(Carver carver, int warps, int stages_of_warp, std::uint32_t stage_bytes)
      : scratch(carver.take<std::int32_t>()),
        barriers(carver.take<device::Mbarrier>(static_cast<std::size_t>(warps * stages_of_warp), kLine)),
        stages(carver.take<std::byte>(static_cast<std::size_t>(warps * stages_of_warp) * stage_bytes, kLine)),
        bytes(carver.bytes()) {}
};

}  // namespace deep_ep
