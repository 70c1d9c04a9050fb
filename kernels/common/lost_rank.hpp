// Who is lost, when a rank has been waited for in vain: it may itself wait for another one.
#pragma once

#include <cstdint>

#include "kernels/primitives/target.hpp"

namespace deep_ep::device {

constexpr int kNotCutOff = -1;

/// What a rank tells: for whom it has waited in vain, and to whom something that it has sent by RDMA got lost
/// (kNotCutOff: nothing did; the rank itself: its NIC reaches nobody). Never 0.
DEEP_EP_HOST_DEVICE constexpr std::uint64_t told_wait(int waited_for, int cut_off_from) {
  return (static_cast<std::uint64_t>(cut_off_from) + 1) << 32 | (static_cast<std::uint64_t>(waited_for) + 1);
}
/// Plus one; 0: for nobody.
DEEP_EP_HOST_DEVICE constexpr std::uint32_t waits_for(std::uint64_t told) { return static_cast<std::uint32_t>(told); }
DEEP_EP_HOST_DEVICE constexpr std::uint32_t cut_off_from(std::uint64_t told) {
  return static_cast<std::uint32_t>(told >> 32);
}

/// The rank with most failures of connections, its own and those of others to it; -1: there is none. Everybody who has
/// posted to a process that has died, or to a NIC, is cut off from that rank, and nearly nobody from any other. Of a
/// rank and the only other one that is cut off from it: that one is lost if it tells nothing; else the one whose
/// operations fail, as theirs to it do not. (Of a broken cable nobody can tell which end it is, but all name the same.)
template <class ToldBy>
DEEP_EP_DEVICE int most_cut_off(int num_ranks, ToldBy told_by) {
  int most = 0, lost = -1;
#pragma unroll 1
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::uint64_t told = told_by(rank);
    int ends = cut_off_from(told) != 0 ? 1 : 0;
    const int says_so = ends;
#pragma unroll 1
    for (int other = 0; other < num_ranks; ++other) {
      if (cut_off_from(told_by(other)) == static_cast<std::uint32_t>(rank) + 1) ++ends;
    }
    const int weight = ends == 0 ? 0 : 3 * ends + (told == 0 ? 2 : says_so);
    if (weight > most) {
      most = weight;
      lost = rank;
    }
  }
  return lost;
}

/// The end of the chain that begins at `waited_for`: who waits for whom, as far as ranks have told. `told_by(rank)` is
/// what the rank has told (told_wait), or 0. Where ranks wait for each other in a circle it is the one to which most
/// connections have failed; where none has, the one that has told nothing, if there is only one; otherwise, or where it
/// would be `rank` itself, `waited_for`. By one thread.
template <class ToldBy>
DEEP_EP_DEVICE int end_of_waits(int rank, int waited_for, int num_ranks, ToldBy told_by) {
  int end = waited_for;
#pragma unroll 1
  for (int hops = 0; hops < num_ranks; ++hops) {
    const std::uint32_t next = waits_for(told_by(end));
    if (next == 0 || next > static_cast<std::uint32_t>(num_ranks)) return end;
    end = static_cast<int>(next) - 1;
  }
  // A circle.
  const int cut_off = most_cut_off(num_ranks, told_by);
  if (cut_off != -1) return cut_off == rank ? waited_for : cut_off;
  int silent = 0;
#pragma unroll 1
  for (int other = 0; other < num_ranks; ++other) {
    if (told_by(other) != 0) continue;
    ++silent;
    end = other;
  }
  return silent == 1 ? end : waited_for;
}

}  // namespace deep_ep::device
