// How long low-latency calls have waited for each rank: the result of Buffer::low_latency_stats. A rank for which all
// others wait long is late.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstdint>
#include <vector>

namespace deep_ep {

/// Calls of one kind, on one rank. [R] each, by source rank; this rank among them.
struct LowLatencyWaitTimes {
  /// Dispatch: calls that the source took part in. Combine: calls for which a token of this rank selected an expert
  /// there.
  std::vector<std::uint64_t> calls = {};
  /// Microseconds in all these calls: dispatch waits, from the end of its own send part, for the source's counts;
  /// combine waits for the source's rows.
  std::vector<double> total_us = {};
  std::vector<double> longest_us = {};  ///< microseconds, the longest of them
};

/// Of one rank, since its first call of Buffer::low_latency_stats.
struct LowLatencyStats {
  LowLatencyWaitTimes dispatch = {};  ///< of dispatches
  LowLatencyWaitTimes combine = {};   ///< of combines
};

}  // namespace deep_ep
