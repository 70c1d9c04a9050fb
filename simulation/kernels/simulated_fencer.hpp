// What the warps of a simulated NIC have in common that tell others what was moved.
#pragma once

#include "kernels/primitives/bits.hpp"
#include "simulation/kernels/simulated_pieces.hpp"

namespace deep_ep::device::simulated {

class Fencer {
 public:
  DEEP_EP_DEVICE explicit Fencer(PieceQueue& queue) : queue_(queue) {}

 protected:
  /// How many lanes from the first on say yes.
  DEEP_EP_DEVICE static int leading(bool yes) {
    const std::uint32_t no = ~warp::ballot(yes);
    return no == 0 ? kWarpSize : lowest_bit(no);
  }
  DEEP_EP_DEVICE static std::uint64_t mine(std::uint64_t from) {
    return from + static_cast<std::uint64_t>(lane_index());
  }

  /// Pieces that have been moved are put behind a fence, as many at once as there are: it waits for all that this SM
  /// has under way.
  DEEP_EP_DEVICE void fence_moved(std::uint64_t known) {
    std::uint64_t moved = fenced_;
    for (int count = kWarpSize; count == kWarpSize; moved += static_cast<std::uint64_t>(count)) {
      const std::uint64_t number = mine(moved);
      const bool there = number < known && load_acquire<Scope::block>(&queue_.moved_of(number)) == number + 1;
      count = leading(there);
    }
    if (moved == fenced_) return;
    warp::sync();  // what the lanes acquired is behind every lane's fence
    fence<Scope::system>();
    fenced_ = moved;
  }

  PieceQueue& queue_;
  std::uint64_t fenced_ = 0;  ///< pieces whose bytes are behind a fence
};

}  // namespace deep_ep::device::simulated
