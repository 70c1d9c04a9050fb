// Where a token's row goes: its slot at each destination, and its place among the rows of each expert. Both follow from
// counts over the tokens before it. Every block counts for itself: reading a few hundred selections takes less time
// than exchanging results between blocks.
#pragma once

#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device::low_latency {

struct Routing {
  const LowLatencyDispatchParams& params;
  std::uint32_t* rows;     ///< [ranks]: tokens counted so far that go to each rank
  std::uint32_t* entries;  ///< [experts]: selections counted so far

  DEEP_EP_DEVICE int num_experts() const { return params.num_local_experts * params.common.num_ranks; }

  /// Selection `k` of a token, as the caller gave it.
  DEEP_EP_DEVICE std::int64_t selection(int token, int k) const {
    return params.topk_idx.load(std::int64_t{token} * params.num_topk + k);
  }
  /// An expert, or -1 for none.
  DEEP_EP_DEVICE int expert_of(std::int64_t selection) const { return deep_ep::expert_of(selection, num_experts()); }

  // A warp counts whole tokens, each lane one selection.

  DEEP_EP_DEVICE int tokens_of_warp() const { return kWarpSize / params.num_topk; }
  /// The token that this lane would count, if the block's first token is `begin`; its selections are consecutive lanes.
  DEEP_EP_DEVICE int token_of_lane(int begin) const {
    const int token = lane_index() / params.num_topk;
    return token < tokens_of_warp() ? begin + warp_index() * tokens_of_warp() + token : params.num_tokens;
  }
  /// The lane's selection of that token; -1 where the token is not before `end`. Separate from count, so that the load
  /// can be under way early.
  DEEP_EP_DEVICE std::int64_t load(int begin, int end) const {
    const int token = token_of_lane(begin);
    return token < end ? selection(token, lane_index() % params.num_topk) : -1;
  }

  /// Is the lane's selection, which falls to `part` (a rank, a node; negative: none), the first of its token that does?
  /// By whole warps.
  DEEP_EP_DEVICE bool is_first(int part) const {
    const std::uint32_t token = static_cast<std::uint32_t>(lane_index() / params.num_topk) << 16;
    const std::uint32_t alone = 0xffff0000u | static_cast<std::uint32_t>(lane_index());
    const std::uint32_t same = warp::match_any(part < 0 ? alone : token | static_cast<std::uint32_t>(part));
    return part >= 0 && lowest_bit(same) == lane_index();
  }

  /// Counts the selections of the tokens from `begin` to before `end`. `first` is what load(begin, end) returned. The
  /// whole block takes part; the counts are complete after its next sync. Returns whether the lane has met an expert
  /// that does not exist.
  DEEP_EP_DEVICE bool count(int begin, int end, std::int64_t first) const {
    const int step = tokens_of_warp() * block_warps();
    bool unknown = false;
#pragma unroll 1
    for (; begin < end; begin += step) {
      const std::int64_t next = begin + step < end ? load(begin + step, end) : -1;
      const int expert = expert_of(first);
      const int rank = expert < 0 ? -1 : expert / params.num_local_experts;
      if (is_first(rank)) add_relaxed<Scope::block>(rows + rank, 1);
      if (expert >= 0) add_relaxed<Scope::block>(entries + expert, 1);
      unknown = unknown || first >= num_experts();
      first = next;
    }
    return unknown;
  }

  /// Counts the tokens that go to each group of `width` ranks, in the same manner.
  DEEP_EP_DEVICE void count_groups(int width, std::uint32_t* groups) const {
    const int step = tokens_of_warp() * block_warps();
#pragma unroll 1
    for (int begin = 0; begin < params.num_tokens; begin += step) {
      const int expert = expert_of(load(begin, params.num_tokens));
      const int group = expert < 0 ? -1 : expert / (width * params.num_local_experts);
      if (is_first(group)) add_relaxed<Scope::block>(groups + group, 1);
    }
  }

  /// Has `token` an expert on one of these ranks?
  DEEP_EP_DEVICE bool goes_to(int token, const RankRange& ranks) const {
    const std::int64_t first = std::int64_t{ranks.first} * params.num_local_experts;
    const std::int64_t end = first + std::int64_t{ranks.count} * params.num_local_experts;
    bool goes = false;
    for (int k = 0; k < params.num_topk; ++k) {
      const std::int64_t expert = selection(token, k);
      goes = goes || (expert >= first && expert < end);
    }
    return goes;
  }
};

}  // namespace deep_ep::device::low_latency
