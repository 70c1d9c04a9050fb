// Agreement among the threads of a rank: which block, or warp, comes last? It raises the signals of the whole rank.
#pragma once

#include <cstdint>

#include "kernels/primitives/block.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// Counts this thread towards `expected`. True for the last one, which sets the ticket back to zero. It sees what all
/// earlier threads wrote before their calls, and so does a thread that acquires a signal that it raises afterwards.
/// Scope::gpu is cheaper, and enough after reads from peers alone.
template <Scope S = Scope::system>
DEEP_EP_DEVICE bool last_to_arrive(std::uint32_t* ticket, std::uint32_t expected) {
  if (fetch_add_acq_rel<S>(ticket, std::uint32_t{1}) + 1 != expected) return false;
  // A ticket of one block may lie in shared memory, which wider scopes cannot name.
  store_relaxed<S == Scope::block ? Scope::block : Scope::gpu>(ticket, std::uint32_t{0});
  return true;
}

/// By a whole warp: takes the next piece of work and returns its number in all lanes.
DEEP_EP_DEVICE std::uint32_t take_next(std::uint32_t* next) {
  return warp::shuffle(lane_index() == 0 ? count_up(next) : 0, 0);
}

/// The pieces of shared work that a warp takes, in their order. Each warp begins with two pieces that its number gives
/// it; the others are drawn. It knows the next one while it works on one.
struct Turns {
  std::uint32_t* drawn;  ///< pieces so far
  std::uint32_t end;     ///< pieces
  std::uint32_t given;   ///< of the pieces that are drawn, the first
  std::uint32_t turn, following;

  DEEP_EP_DEVICE static Turns of_warp(std::uint32_t* drawn, std::uint32_t end, int warps, int number) {
    const auto all = static_cast<std::uint32_t>(warps), first = static_cast<std::uint32_t>(number);
    return {drawn, end, 2 * all, first, first + all};
  }
  /// Of a warp beside these, which comes later.
  DEEP_EP_DEVICE static Turns of_late_warp(std::uint32_t* drawn, std::uint32_t end, int warps) {
    Turns turns{drawn, end, 2 * static_cast<std::uint32_t>(warps), end, end};
    if (turns.given >= end) return turns;
    const std::uint32_t first = turns.draw_piece(), second = turns.draw_piece();
    turns.turn = turns.given + warp::shuffle(first, 0);
    turns.following = turns.given + warp::shuffle(second, 0);
    return turns;
  }

  DEEP_EP_DEVICE bool over() const { return turn >= end; }
  /// Draws another piece, which is not needed before advance(): until then nothing looks at what it returns, not even
  /// to add something to it, so that the warp does not wait for it.
  DEEP_EP_DEVICE std::uint32_t draw() const { return following < end ? draw_piece() : end; }
  DEEP_EP_DEVICE void advance(std::uint32_t piece) {
    turn = following;
    following = given + warp::shuffle(piece, 0);
  }
  /// `work(known, next)` for each piece until that is false: what `look(turn)` has found out about the piece, `known`
  /// for the first one, and about the one behind, which is drawn and looked up meanwhile. False if it was.
  template <class Known, class Look, class Work>
  DEEP_EP_DEVICE bool each(Known known, Look look, Work work) {
    while (!over()) {
      const std::uint32_t piece = draw();
      const Known next = look(following);
      if (!work(known, next)) return false;
      advance(piece);
      known = next;
    }
    return true;
  }

 private:
  DEEP_EP_DEVICE std::uint32_t draw_piece() const { return lane_index() == 0 ? count_up(drawn) : 0; }
};

/// last_to_arrive for all blocks: all threads of the block take part and get the same answer.
template <Scope S = Scope::system>
DEEP_EP_DEVICE bool last_block_to_arrive(std::uint32_t* ticket) {
  block::sync();  // the block's work is done
  const bool last = thread_index() == 0 && last_to_arrive<S>(ticket, static_cast<std::uint32_t>(grid_blocks()));
  return !block::all(!last);
}

}  // namespace deep_ep::device
