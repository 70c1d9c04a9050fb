// Do the ranks of a buffer end it together, in the bootstrap's barrier, or each alone? A decision that all must share:
// whoever goes to the barrier waits there for everybody.
//
// Ranks see what the others show, each at its own time, and any rank may run out of patience with one that does not
// come. So nobody goes to the barrier because all have come: one of them may just have left. A rank shows that it has
// seen all come (`meets`), and goes there when all show that. Who shows it does not leave by impatience any more, but
// only after somebody else; and who leaves first has never shown it. So either all get to see `meets` of everybody, or
// nobody does, whenever they look: there is no window. (Impatience is about ranks that have not come. One that dies
// after it has come is met by the bootstrap's own deadline.)
#pragma once

#include <algorithm>
#include <span>

#include "kernels/low_latency/window.hpp"

namespace deep_ep {

/// What a rank shows next. `shown`: what each rank has shown, this one too. `gives_up_one`: it has masked a rank, or
/// its buffer is of no use. `late`: it has been here for so long that who has not come is lost.
inline LowLatencyEnding next_ending(std::span<const LowLatencyEnding> shown, bool gives_up_one, bool late, int rank) {
  if (gives_up_one || std::ranges::count(shown, LowLatencyEnding::goes_alone) != 0) return LowLatencyEnding::goes_alone;
  bool all_here = true;
  for (std::size_t other = 0; other < shown.size(); ++other) {
    all_here = all_here && (shown[other] != LowLatencyEnding::no || other == static_cast<std::size_t>(rank));
  }
  if (all_here) return LowLatencyEnding::meets;
  return late ? LowLatencyEnding::goes_alone : LowLatencyEnding::waits_for_others;
}

/// May a rank that shows `meets` go to the barrier?
inline bool all_meet(std::span<const LowLatencyEnding> shown, int rank) {
  for (std::size_t other = 0; other < shown.size(); ++other) {
    if (shown[other] != LowLatencyEnding::meets && other != static_cast<std::size_t>(rank)) return false;
  }
  return true;
}

}  // namespace deep_ep
