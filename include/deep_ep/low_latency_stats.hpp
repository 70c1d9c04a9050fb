// How long low-latency calls have waited for each rank, and which rank is late.
//
//   buffer.low_latency_stats();              // the first call: from now on
//   ...                                      // calls
//   LowLatencyStats own = buffer.low_latency_stats();
//   LowLatencyVerdict verdict = find_late_ranks(gather_low_latency_stats(bootstrap, own));
//   verdict.text                             // "rank 5 is late: the others wait 812.4 us for it, ..."
#pragma once
// SPDX-License-Identifier: MIT

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "deep_ep/bootstrap.hpp"

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

  /// Microseconds of a call on average; 0 without calls.
  double mean_us(int source) const;
};

/// The result of Buffer::low_latency_stats, of one rank.
struct LowLatencyStats {
  int rank = 0;                       ///< the rank that waits
  LowLatencyWaitTimes dispatch = {};  ///< of dispatches
  LowLatencyWaitTimes combine = {};   ///< of combines

  /// Microseconds for a dispatch and a combine, on average.
  double mean_us(int source) const { return dispatch.mean_us(source) + combine.mean_us(source); }
};

/// The state of the statistics after they have been read.
enum class LowLatencyStatsThen : std::uint8_t {
  go_on,
  reset,  ///< they begin at zero
  stop,   ///< later calls are not measured until the next call of low_latency_stats
};

/// The result of find_late_ranks.
struct LowLatencyVerdict {
  std::vector<int> late = {};  ///< ranks, the latest first
  std::vector<double> waited_us =
      {};                 ///< [R]: microseconds that the others wait for the rank in a dispatch and a combine
  std::string text = {};  ///< a sentence
};

/// A rank is late if the others wait for it this many microseconds longer than for the rank with the shortest wait.
constexpr double kLateRankThresholdUs = 50;

/// The rule: the wait for a rank is the lower median of the other ranks' mean waits in a dispatch and a combine. A rank
/// is late if this is `threshold_us` longer than for the rank with the shortest wait, and by at least half of the
/// slowest rank's excess: a rank that waits for a late one may become a little late itself. With the statistics of one
/// rank, its waits count. @throws InvalidArgument if `stats` is empty or of ranks of different groups.
LowLatencyVerdict find_late_ranks(std::span<const LowLatencyStats> stats, double threshold_us = kLateRankThresholdUs);

/// Collective over the bootstrap: the statistics of all ranks, by rank.
/// @param own of this rank. @throws what Bootstrap::all_gather does.
std::vector<LowLatencyStats> gather_low_latency_stats(Bootstrap& bootstrap, const LowLatencyStats& own);

}  // namespace deep_ep
