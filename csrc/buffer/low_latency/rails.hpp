// When rows of low-latency calls go by rails: see LowLatencyRails.
#pragma once

#include <cstddef>

#include "deep_ep/buffer.hpp"

namespace deep_ep {

/// What `asked` means: where it is automatic, DEEP_EP_LOW_LATENCY_RAILS.
LowLatencyRails asked_for_rails(LowLatencyRails asked);

/// A call as the model sees it: the same on all ranks, so that they come to the same result.
struct RailTraffic {
  int ranks;
  int ranks_per_node;
  int topk;
  int max_tokens;
  std::size_t row_bytes;       ///< as it travels directly
  std::size_t rail_row_bytes;  ///< and by rails
};

/// Bytes that one rank sends to other nodes, if every selection were any expert with the same probability.
struct RailBytes {
  double direct;    ///< a row for each rank that is selected
  double by_rails;  ///< a row for each node that is selected
};
RailBytes bytes_between_nodes(const RailTraffic& traffic);

/// Do rails save more time of the NIC, at 50 GB/s, than the additional hop takes, about 5 us?
bool rails_pay(const RailTraffic& traffic);

}  // namespace deep_ep
