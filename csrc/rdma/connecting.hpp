// How the ranks connect their queue pairs, and what they do when a device refuses that.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "csrc/rdma/connections.hpp"
#include "csrc/rdma/ends.hpp"

namespace deep_ep::rdma {

/// Makes the ends of this rank for a handler. Null where it reaches nobody.
using MakeEnds = std::function<std::unique_ptr<Ends>(NicHandler)>;

struct ConnectedEnds {
  std::unique_ptr<Ends> ends;
  std::vector<RdmaPeerParams> peers;  ///< [channels][ranks], for kernels
};

/// Collective. Makes the ends, connects each to the one at its other side, and starts them. Connecting is what a device
/// or fabric may refuse although all else worked: where that happens to ends that kernels ring, and nobody insists on
/// them, every rank that leaves the handler open makes its ends again, for the handler `cpu`. Otherwise throws, on
/// every rank. `may_fall_back`: some rank leaves the handler open and has a device, the same on all ranks; else no
/// exchange is spent on how connecting went.
ConnectedEnds make_connected_ends(Bootstrap& bootstrap, const ConnectionOptions& options, NicHandler wanted,
                                  bool may_fall_back, const MakeEnds& make);

}  // namespace deep_ep::rdma
