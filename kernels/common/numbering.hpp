// Numbers tokens in their order, by a whole block.
#pragma once

#include <cstdint>

#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// Shared memory of a block that numbers tokens.
struct Numbering {
  static constexpr int kTurns = 8;  ///< tokens that a thread asks about at once, so that their loads are under way

  std::int32_t members[kTurns][32];  ///< of each warp, in each turn
};

/// By all threads of a block: numbers the tokens that `is_member(token)` holds for, and tells `place(token, number)`,
/// with -1 for the others. A thread asks about the tokens that it tells about: thread_index() plus multiples of
/// block_threads(). Returns how many members there are. Warps ask as a whole, each about 32 tokens in their order, also
/// about some behind the last, which are no members.
template <class IsMember, class Place>
DEEP_EP_DEVICE int number_members(int num_tokens, Numbering& shared, IsMember is_member, Place place) {
  constexpr int kTurns = Numbering::kTurns;
  int before_turn = 0;
  for (int first = 0; first < num_tokens; first += kTurns * block_threads()) {
    // 1. Each warp counts its members.
    std::uint32_t asked = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int token = first + turn * block_threads() + thread_index();
      asked |= token - lane_index() < num_tokens && is_member(token) ? 1u << turn : 0u;
    }
    const auto members_of = [&](int turn) { return warp::ballot((asked >> turn & 1) != 0); };
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int count = count_bits(members_of(turn));
      if (lane_index() == turn) shared.members[turn][warp_index()] = count;
    }
    block::sync();

    // 2. Add those of the turns, warps and lanes before.
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int token = first + turn * block_threads() + thread_index();
      if (token - thread_index() < num_tokens) {  // for all threads alike
        const int count = lane_index() < block_warps() ? shared.members[turn][lane_index()] : 0;
        const int through = warp::inclusive_sum(count);
        const int before = before_turn + warp::shuffle(through - count, warp_index());
        const std::uint32_t members = members_of(turn) & ((2u << lane_index()) - 1);  // of this lane and those before
        const bool member = (asked >> turn & 1) != 0;
        if (token < num_tokens) place(token, member ? before + count_bits(members) - 1 : -1);
        before_turn += warp::shuffle(through, kWarpSize - 1);
      }
    }
    block::sync();  // the next turns write the counts again
  }
  return before_turn;
}

}  // namespace deep_ep::device
