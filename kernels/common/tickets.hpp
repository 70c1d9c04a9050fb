// Agreement among the threads of a rank. Which block, or warp, comes last? That one speaks for all: it raises the
// signals of the whole rank. And did every thread of a block succeed?
#pragma once

#include <cstdint>

#include "kernels/primitives/block.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// Counts this thread, or `pieces` pieces of its work, towards `expected`. True for the last one, which sets the ticket
/// back to zero. What every earlier thread wrote before its call is visible to the last one, and to whoever acquires a
/// signal that it raises afterwards. Scope::gpu is cheaper, and enough for those who have only read from peers.
template <Scope S = Scope::system>
DEEP_EP_DEVICE bool last_to_arrive(std::uint32_t* ticket, std::uint32_t expected, std::uint32_t pieces = 1) {
  if (fetch_add_acq_rel<S>(ticket, pieces) + pieces != expected) return false;
  // A ticket of one block may lie in shared memory, which wider scopes cannot name.
  store_relaxed<S == Scope::block ? Scope::block : Scope::gpu>(ticket, std::uint32_t{0});
  return true;
}

/// By a whole warp: takes the next piece of work and returns its number in all lanes.
DEEP_EP_DEVICE std::uint32_t take_next(std::uint32_t* next) {
  return warp::shuffle(lane_index() == 0 ? fetch_add_relaxed<Scope::gpu>(next, std::uint32_t{1}) : 0, 0);
}

/// last_to_arrive for `blocks` whole blocks: all threads of the block take part and get the same answer. `scratch` is a
/// word of shared memory that is not in use.
DEEP_EP_DEVICE bool last_of_blocks(std::uint32_t* ticket, int blocks, std::int32_t* scratch) {
  block::sync();  // the block's work is done, and so is the last use of `scratch`
  if (thread_index() == 0) *scratch = last_to_arrive(ticket, static_cast<std::uint32_t>(blocks)) ? 1 : 0;
  block::sync();
  const bool last = *scratch != 0;
  block::sync();  // `scratch` may be written again
  return last;
}

/// The same for all blocks of the grid.
DEEP_EP_DEVICE bool last_block_to_arrive(std::uint32_t* ticket, std::int32_t* scratch) {
  return last_of_blocks(ticket, grid_blocks(), scratch);
}

/// True in all threads of the block when `good` is true in every one. `scratch` as above.
DEEP_EP_DEVICE bool whole_block(bool good, std::int32_t* scratch) {
  block::sync();
  if (thread_index() == 0) *scratch = 1;
  block::sync();
  if (!good) store_relaxed<Scope::block>(scratch, 0);
  block::sync();
  const bool all_good = *scratch != 0;
  block::sync();
  return all_good;
}

}  // namespace deep_ep::device
