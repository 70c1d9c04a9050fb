// By rails: where nodes have several ranks each, a row crosses the network once for each node, between ranks that have
// the same index in their nodes, and is handed on over NVLink. Nodes are of equally many consecutive ranks.
//
//   dispatch   sender -- NIC --> its rail in the expert's node, the relay -- NVLink --> each rank with an expert
//   combine    each rank with an expert -- NVLink --> the owner's rail there, the relay, adds -- NIC --> owner
//
// A relay hands on within its own call: so all ranks of a call go by rails or none, and only calls that receive at once
// do. Counts, selections and acknowledgements go directly, as ever. In the receiver's window, rows of dispatch that are
// handed on take the place of their far source. In the relay's, rows of combine from a rank of its node take the place
// of the rank with the same index in the owner's node, which sends it none; its own do not travel.
#pragma once

#include "kernels/low_latency/params.hpp"

namespace deep_ep::device {

/// Of one rank, in one call.
struct Rails {
  int width;  ///< ranks of a node; 0: rows go directly
  int rank;   ///< this one
  int num_nodes;

  DEEP_EP_DEVICE explicit Rails(const LowLatencyParams& common)
      : width(common.rdma.rail_width), rank(common.rank), num_nodes(width == 0 ? 1 : common.num_ranks / width) {}

  DEEP_EP_DEVICE bool used() const { return width != 0; }
  DEEP_EP_DEVICE int node_of(int of_rank) const { return of_rank / width; }
  DEEP_EP_DEVICE int own_node() const { return node_of(rank); }
  /// The rank of `node` that this rank exchanges rows with.
  DEEP_EP_DEVICE int rail_in(int node) const { return node * width + rank % width; }
  DEEP_EP_DEVICE bool is_rail(int far_rank) const { return far_rank % width == rank % width; }
  /// The rank of this node that exchanges rows with `far_rank`.
  DEEP_EP_DEVICE int relay_of(int far_rank) const { return own_node() * width + far_rank % width; }
  /// Whose place in the window of the relay of `far_rank` combine's rows of `member` of this node take.
  DEEP_EP_DEVICE int place_at_relay(int far_rank, int member) const {
    return node_of(far_rank) * width + member % width;
  }
};

}  // namespace deep_ep::device
