// How the ends of all ranks are connected, and whether they reach each other.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "csrc/rdma/ends.hpp"

namespace deep_ep {
class Bootstrap;
}

namespace deep_ep::rdma {

/// Makes the ends of this rank for a set of queue pairs and a handler.
using MakeEnds = std::function<std::unique_ptr<Ends>(NicHandler handler, const ConnectionOptions& options)>;

struct ConnectedEnds {
  std::unique_ptr<Ends> ends;         ///< null where the set has no peers
  std::vector<RdmaQueuePair> params;  ///< of each end, for kernels
};

/// Collective, in a step that ranks agree on. Makes the ends of each set, connects each to the one at its other side,
/// and starts them. All ranks that leave the handler open get the same one: the first of `gpu`, `doorbell` and `cpu`
/// that can be made and connected on each of them, with one warning that says why not an earlier one; throws where none
/// can. `may_fall_back`: the wire has several handlers; else there is one attempt, and no exchange is spent on how its
/// steps went.
std::vector<ConnectedEnds> make_connected_ends(Bootstrap& bootstrap, std::span<const ConnectionOptions> sets,
                                               NicHandler wanted, bool may_fall_back, const MakeEnds& make);

/// Collective, in such a step. Queue pairs of the wire's handler `cpu`, or its only one, try whether each rank reaches
/// the other rails of the nodes before and after its own; nodes are of `width` consecutive ranks. `by_landings`: over
/// its own rail, see ConnectionOptions::rail_width. Empty: all are reached. Else why one is not, the same text on all
/// ranks.
std::string why_unreached(Bootstrap& bootstrap, int width, bool by_landings, std::uint64_t sink, const MakeEnds& make);

}  // namespace deep_ep::rdma
