// Arguments of the layout kernel: counts tokens per rank, per expert and per node.
#pragma once

#include <cstdint>

#include "kernels/common/faults.hpp"
#include "kernels/common/topk.hpp"
#include "kernels/primitives/divisor.hpp"

namespace deep_ep {

/// Where blocks add up their counts, in device memory of the buffer. Zero when it is made, and left zero by each call.
struct LayoutWork {
  std::uint32_t ticket;    ///< blocks that have added theirs
  std::int32_t totals[1];  ///< [num_ranks + num_nodes + num_experts]; allocated behind the struct
};

struct LayoutParams {
  TopkIndices topk_idx;  ///< [num_tokens, num_topk]
  int num_tokens;
  int num_topk;
  int num_experts;
  int num_ranks;
  int ranks_per_node;  ///< divides num_ranks
  int num_nodes;       ///< 0 where nobody asks for them: there is one
  Divisor columns;     ///< num_ranks + num_nodes
  LayoutWork* work;
  std::int32_t* num_tokens_per_rank;    ///< [num_ranks]
  std::int32_t* num_tokens_per_expert;  ///< [num_experts]
  std::int32_t* num_tokens_per_node;    ///< [num_nodes]
  std::uint8_t* is_token_in_rank;       ///< [num_tokens, num_ranks]

  /// Of ranks, then of nodes, then of experts. A block counts in shared memory.
  DEEP_EP_HOST_DEVICE int counters() const { return num_ranks + num_nodes + num_experts; }
};

}  // namespace deep_ep
