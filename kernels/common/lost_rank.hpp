// Who is lost, when a rank has been waited for in vain: it may itself wait for another one.
#pragma once

#include <cstdint>

#include "kernels/primitives/target.hpp"

namespace deep_ep::device {

/// The end of the chain that begins at `waited_for`: who waits for whom, as far as ranks have told. `told_by(rank)` is
/// for whom the rank has waited in vain, plus one, or 0: it has told nothing. Where ranks wait for each other in a
/// circle it is the one that has told nothing, if there is only one; otherwise `waited_for`. By one thread.
template <class ToldBy>
DEEP_EP_DEVICE int end_of_waits(int waited_for, int num_ranks, ToldBy told_by) {
  int end = waited_for;
  for (int hops = 0; hops < num_ranks; ++hops) {
    const std::uint64_t told = told_by(end);
    if (told == 0 || told > static_cast<std::uint64_t>(num_ranks)) return end;
    end = static_cast<int>(told) - 1;
  }
  int silent = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (told_by(rank) != 0) continue;
    ++silent;
    end = rank;
  }
  return silent == 1 ? end : waited_for;
}

}  // namespace deep_ep::device
