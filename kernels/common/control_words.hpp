// Plain data, which the control plane knows, too.
#pragma once

#include <cstdint>

#include "kernels/common/limits.hpp"

namespace deep_ep {

/// Words by which waits of a rank and its control thread (csrc/control/) tell each other. In memory that host and
/// kernels share, one for each buffer and rank.
struct ControlWords {
  // By the control thread.
  std::uint32_t changes;          ///< grows with each verdict and goodbye; written last, with release order
  std::uint32_t lost[kMaxRanks];  ///< 0, or 1 + the rank because of which nothing comes from this one any more; with
                                  ///< masks for this rank itself, too: the others go on without it
  std::uint32_t left[kMaxRanks];  ///< 1: the rank has left the buffer, and all that it has sent is visible
  // By the host.
  std::uint64_t calls;  ///< made so far, but for recorded ones and replays
  // By kernels, `ended` also by the host.
  std::uint32_t ended;              ///< 1 + the rank because of which this one has ended its calls; 0: it has not
  std::uint64_t waits[kMaxRanks];   ///< how long a wait for this peer has lasted, in ns; written while it lasts
  std::uint32_t beats[kMaxRanks];   ///< of the same: another number each time
  std::uint32_t wanted[kMaxRanks];  ///< of the same: a Wanted
  std::uint32_t failed[kMaxRanks];  ///< 0, or 1 + the RdmaFailure of a queue pair to this peer
};

}  // namespace deep_ep
