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

/// Work that warps share: each begins with two pieces that its number gives it; the others are drawn.
struct SharedWork {
  std::uint32_t* drawn;  ///< pieces so far
  std::uint32_t end;     ///< pieces
  int warps;

  /// Of the pieces that are drawn, the first.
  DEEP_EP_DEVICE std::uint32_t given() const { return 2 * static_cast<std::uint32_t>(warps); }
  /// Draws a piece: in lane 0 its number behind given(), which all lanes learn from it.
  DEEP_EP_DEVICE std::uint32_t draw() const { return lane_index() == 0 ? count_up(drawn) : 0; }
};

/// The pieces that a warp takes, in their order. It knows the next one while it works on one.
struct Turns {
  std::uint32_t turn, following;
  std::uint32_t given = 0;  ///< SharedWork::given()

  /// Of warp `number`.
  DEEP_EP_DEVICE static Turns of_warp(const SharedWork& work, int number) {
    const auto first = static_cast<std::uint32_t>(number);
    return {first, first + static_cast<std::uint32_t>(work.warps), work.given()};
  }
  /// Of a warp beside these, which comes later.
  DEEP_EP_DEVICE static Turns of_late_warp(const SharedWork& work) {
    if (work.given() >= work.end) return {work.end, work.end, work.given()};
    const std::uint32_t first = work.draw(), second = work.draw();
    return {work.given() + warp::shuffle(first, 0), work.given() + warp::shuffle(second, 0), work.given()};
  }
  /// Draws another piece, which is not needed before advance(): until then nothing looks at what it returns, not even
  /// to add something to it, so that the warp does not wait for it.
  DEEP_EP_DEVICE std::uint32_t draw(const SharedWork& work) const {
    return following < work.end ? work.draw() : work.end;
  }
  DEEP_EP_DEVICE void advance(std::uint32_t drawn) {
    turn = following;
    following = given + warp::shuffle(drawn, 0);
  }
};

/// last_to_arrive for `blocks` whole blocks: all threads of the block take part and get the same answer.
template <Scope S = Scope::system>
DEEP_EP_DEVICE bool last_of_blocks(std::uint32_t* ticket, int blocks) {
  block::sync();  // the block's work is done
  const bool last = thread_index() == 0 && last_to_arrive<S>(ticket, static_cast<std::uint32_t>(blocks));
  return !block::all(!last);
}

/// The same for all blocks of the grid.
template <Scope S = Scope::system>
DEEP_EP_DEVICE bool last_block_to_arrive(std::uint32_t* ticket) {
  return last_of_blocks<S>(ticket, grid_blocks());
}

}  // namespace deep_ep::device
