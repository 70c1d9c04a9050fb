// How many blocks of a low-latency kernel post to ranks that are reached by RDMA.
#pragma once

#include <algorithm>

#include "deep_ep/config.hpp"
#include "deep_ep/executor.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

/// One warp a rank, of blocks of `warps` warps; none where NVLink reaches everybody.
inline int poster_blocks(const LowLatencyParams& common, int warps) {
  return common.peers == nullptr ? 0 : (common.num_ranks + warps - 1) / warps;
}

/// Blocks for everything else: no more in all than there are SMs, or than the caller allows.
inline int most_working_blocks(const Config& config, const LaunchPolicy& policy, int posters) {
  const int sms = config.num_sms != 0 ? std::min(config.num_sms, policy.multiprocessors) : policy.multiprocessors;
  return std::max(1, sms - posters);
}

}  // namespace deep_ep
