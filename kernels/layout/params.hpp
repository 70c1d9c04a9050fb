// Arguments of the layout kernel: counts tokens per rank and per expert.
#pragma once

#include <cstdint>

#include "kernels/common/faults.hpp"

namespace deep_ep {

/// Where blocks add up their counts, in device memory of the buffer. Zero when it is made, and left zero by each call.
struct LayoutWork {
  std::uint32_t ticket;    ///< blocks that have added theirs
  std::int32_t totals[1];  ///< [num_ranks + num_experts]; allocated behind the struct
};

struct LayoutParams {
  WaitContext wait;             ///< where an unknown expert is reported
  bool report_unknown_experts;  ///< else it selects nothing, like a negative one
  const void* topk_idx;         ///< [num_tokens, num_topk], 32 or 64 bit
  bool topk_idx_is_64_bit;
  int num_tokens;
  int num_topk;
  int num_experts;
  int num_ranks;
  LayoutWork* work;
  std::int32_t* num_tokens_per_rank;    ///< [num_ranks]
  std::int32_t* num_tokens_per_expert;  ///< [num_experts]
  std::uint8_t* is_token_in_rank;       ///< [num_tokens, num_ranks]
};

}  // namespace deep_ep
