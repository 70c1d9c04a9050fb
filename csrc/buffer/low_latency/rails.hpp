// How low-latency calls reach other ranks, and when their rows go by rails: see LowLatencyRails.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "csrc/memory/node_membership.hpp"
#include "deep_ep/buffer.hpp"

namespace deep_ep {

/// What `asked` means: where it is automatic, DEEP_EP_LOW_LATENCY_RAILS.
LowLatencyRails asked_for_rails(LowLatencyRails asked);

/// Which ranks a rank reaches by RDMA, and whether calls may go by rails.
struct LowLatencyReach {
  std::vector<int> far;           ///< ranks that are reached by RDMA
  int rail_width = 0;             ///< ranks of a node, where calls may go by rails; else 0
  bool rails_always = false;      ///< wherever they may; else where they pay
  const char* why_no_rails = "";  ///< where they may not
  int lanes = 1;                  ///< see LowLatencyOptions::lanes

  /// `options` with the rails and lanes that were asked for (asked_for_rails, asked_for_lanes); lanes 0 count as 1.
  static LowLatencyReach find(const BufferOptions& options, const NodeMembership& nodes);
  /// For the log: "by rails ..." or "not by rails, ...".
  std::string describe_rails() const;
};

/// A call as the model sees it: the same on all ranks, so that all arrive at the same result.
struct RailTraffic {
  int ranks;
  int ranks_per_node;
  int topk;
  int max_tokens;
  std::size_t row_bytes;       ///< as it travels directly
  std::size_t rail_row_bytes;  ///< and by rails
};

/// Bytes that one rank sends to other nodes, if every expert is equally likely to be selected.
struct RailBytes {
  double direct;    ///< a row for each rank that is selected
  double by_rails;  ///< a row for each node that is selected
};
RailBytes bytes_between_nodes(const RailTraffic& traffic);

/// Do rails save more time of the NIC, at 50 GB/s, than the additional hop takes, about 5 us?
bool rails_pay(const RailTraffic& traffic);

}  // namespace deep_ep
