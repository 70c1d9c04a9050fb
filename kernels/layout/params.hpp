// Arguments of the layout kernel: counts tokens per rank and per expert.
#pragma once

#include <cstdint>

#include "kernels/primitives/signal.hpp"

namespace deep_ep {

struct LayoutParams {
  WaitContext wait;                      ///< where an unknown expert is reported
  bool report_unknown_experts;           ///< else it selects nothing, like a negative one
  const void* topk_idx;                  ///< [num_tokens, num_topk], 32 or 64 bit
  bool topk_idx_is_64_bit;
  int num_tokens;
  int num_topk;
  int num_experts;
  int num_ranks;
  std::int32_t* num_tokens_per_rank;     ///< [num_ranks], zero at the start
  std::int32_t* num_tokens_per_expert;   ///< [num_experts], zero at the start
  std::uint8_t* is_token_in_rank;        ///< [num_tokens, num_ranks]
};

}  // namespace deep_ep
