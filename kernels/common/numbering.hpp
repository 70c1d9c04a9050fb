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
/// block_threads(). Returns how many members there are. `members_in_warp`: 32 words of shared memory.
template <class IsMember, class Place>
DEEP_EP_DEVICE int number_members(int num_tokens, std::int32_t* members_in_warp, IsMember is_member, Place place) {
  int before_block = 0;
  for (int first = 0; first < num_tokens; first += block_threads()) {
    const int token = first + thread_index();
    const bool member = token < num_tokens && is_member(token);
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
