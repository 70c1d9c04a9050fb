// How many lanes the rows of a call between nodes take in turn to each rail.
#pragma once

#include <cstdint>

#include "deep_ep/options.hpp"

namespace deep_ep {

/// What InternodeOptions::lanes and num_qps_per_rank mean: where the program leaves the lanes open,
/// DEEP_EP_INTERNODE_LANES, but no more than it allows. InvalidArgument.
int asked_for_internode_lanes(const InternodeOptions& options);

/// The most lanes that `num_qps_per_rank` allows.
int most_internode_lanes(int num_qps_per_rank);

/// Depth of the lanes' queue pairs: no fewer entries than a call can have posted to a lane's rows that are not complete
/// (the shape, and for each chunk that a ring holds of the lane a write and an addition). A poster would wait for its
/// NIC otherwise, and with it all that its warp serves.
std::uint32_t internode_depth(int lanes);

}  // namespace deep_ep
