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

/// Entries that a call can have posted to a lane's rows, and that are not complete: the shape, and for each chunk that
/// a ring holds of the lane a write and an addition.
std::uint32_t entries_in_flight(int lanes);
/// Depth of the lanes' queue pairs: that many.
std::uint32_t internode_depth(int lanes);
/// InvalidArgument for a depth that does not hold them: a posting thread would wait for its NIC, and with it all that
/// its warp serves.
void check_internode_depth(std::uint32_t depth, int lanes);

}  // namespace deep_ep
