// Numbers tokens in their order, by a whole block.
#pragma once

#include <cstdint>

#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// By all threads of a block: numbers the tokens that `is_member(token)` holds for, and tells `place(token, number)`,
/// with -1 for the others. A thread asks about the tokens that it tells about: thread_index() plus multiples of
/// block_threads(). Returns how many members there are. `members_in_warp`: 32 words of shared memory. A thread asks
/// about several tokens before it tells about the first of them, so that their loads are under way at once. Warps ask
/// as a whole, each about 32 tokens in their order, also about some behind the last, which are no members.
template <class IsMember, class Place>
DEEP_EP_DEVICE int number_members(int num_tokens, std::int32_t* members_in_warp, IsMember is_member, Place place) {
  constexpr int kTogether = 8;
  int before_block = 0;
  std::uint32_t asked = 0;
  int turn = 0;
  for (int first = 0; first < num_tokens; first += block_threads(), ++turn) {
    const int token = first + thread_index();
    if (turn % kTogether == 0) {
      asked = 0;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int other = token + i * block_threads();
        asked |= is_member(other) ? 1u << i : 0u;
      }
    }
    const bool member = (asked >> turn % kTogether & 1) != 0;
    const std::uint32_t members = warp::ballot(member);
    if (lane_index() == 0) members_in_warp[warp_index()] = count_bits(members);
    block::sync();
    int before = before_block + count_bits(members & ((1u << lane_index()) - 1));
    for (int warp = 0; warp < block_warps(); ++warp) {
      if (warp < warp_index()) before += members_in_warp[warp];
      before_block += members_in_warp[warp];
    }
    if (token < num_tokens) place(token, member ? before : -1);
    block::sync();  // the next turn writes members_in_warp again
  }
  return before_block;
}

}  // namespace deep_ep::device
