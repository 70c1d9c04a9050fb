// How long low-latency calls have waited for each rank, and which rank is the slow one.
//
//   buffer.low_latency_stats();              // the first call: from now on
//   ...                                      // calls
//   LowLatencyStats own = buffer.low_latency_stats();
//   LowLatencyVerdict verdict = find_late_ranks(gather_low_latency_stats(bootstrap, own));
//   verdict.text                             // "rank 5 is late: the others wait 812.4 us for it, ..."
#pragma once

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
  /// In all these calls: dispatch waits until the source has told how many rows come, from the end of its own send part
  /// on; combine until the source's rows are there.
  std::vector<double> total_us = {};
  std::vector<double> longest_us = {};  ///< in one of them

  /// A call's, on average; 0 without calls.
  double mean_us(int source) const;
};

/// The result of Buffer::low_latency_stats, of one rank.
struct LowLatencyStats {
  int rank = 0;                       ///< that waits
  LowLatencyWaitTimes dispatch = {};  ///< of dispatches
  LowLatencyWaitTimes combine = {};   ///< of combines

  /// For a dispatch and a combine, on average.
  double mean_us(int source) const { return dispatch.mean_us(source) + combine.mean_us(source); }
};

/// The state of the statistics after they have been read.
enum class LowLatencyStatsThen : std::uint8_t {
  go_on,
  reset,  ///< they begin anew
  stop,   ///< later calls are not measured, until they are asked for again, from zero
};

/// The result of find_late_ranks.
struct LowLatencyVerdict {
  std::vector<int> late = {};          ///< ranks, the slowest first; empty: no rank is late
  std::vector<double> waited_us = {};  ///< [R]: how long the others wait for the rank in a dispatch and a combine
  std::string text = {};               ///< a sentence
};

/// How much longer than for the quickest rank, in microseconds, the others must wait for one that is called late.
constexpr double kLateRankThresholdUs = 50;

/// The rule: for a rank, the others wait as long as the (lower) median of them does, in a dispatch and a combine on
/// average. It is late where that is `threshold_us` longer than for the rank for which they wait least, and at least
/// half as much longer as for the slowest one: a rank that waits for a late one may become a little late by it.
/// With the statistics of one rank alone, it is that rank that waits. @throws InvalidArgument where they do not fit
/// together, or `stats` is empty.
LowLatencyVerdict find_late_ranks(std::span<const LowLatencyStats> stats, double threshold_us = kLateRankThresholdUs);

/// Collective over the bootstrap: the statistics of all ranks, by rank.
/// @param own of this rank. @throws what Bootstrap::all_gather does.
std::vector<LowLatencyStats> gather_low_latency_stats(Bootstrap& bootstrap, const LowLatencyStats& own);

}  // namespace deep_ep
