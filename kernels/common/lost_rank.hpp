// Who is lost, when a rank has been waited for in vain: it may itself wait for another one.
#pragma once

#include <cstdint>

#include "kernels/primitives/target.hpp"

namespace deep_ep::device {

/// What a rank tells: for whom it has waited in vain, and whether something that it has sent got lost. Never 0.
DEEP_EP_HOST_DEVICE constexpr std::uint64_t told_wait(int waited_for, bool cut_off) {
  return static_cast<std::uint64_t>(cut_off ? 1 : 0) << 32 | (static_cast<std::uint64_t>(waited_for) + 1);
}

/// The end of the chain that begins at `waited_for`: who waits for whom, as far as ranks have told. `told_by(rank)` is
/// what the rank has told (told_wait), or 0. Where ranks wait for each other in a circle it is the one among them of
/// which something got lost: the others wait for that, and it for them. Else the one that has told nothing, if there is
/// only one; otherwise, or where it would be `rank` itself, `waited_for`. By one thread.
template <class ToldBy>
DEEP_EP_DEVICE int end_of_waits(int rank, int waited_for, int num_ranks, ToldBy told_by) {
  int end = waited_for;
  for (int hops = 0; hops < 2 * num_ranks; ++hops) {
    const std::uint64_t told = told_by(end);
    const auto next = static_cast<std::uint32_t>(told);
    if (next == 0 || next > static_cast<std::uint32_t>(num_ranks)) return end;
    const bool in_a_circle = hops >= num_ranks;
    if (in_a_circle && told >> 32 != 0) return end == rank ? waited_for : end;
    end = static_cast<int>(next) - 1;
  }
  int silent = 0;
  for (int other = 0; other < num_ranks; ++other) {
    if (told_by(other) != 0) continue;
    ++silent;
    end = other;
  }
  return silent == 1 ? end : waited_for;
}

}  // namespace deep_ep::device
