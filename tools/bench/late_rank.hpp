// `deep_ep bench low-latency --who-is-late` and `--trace`: calls with statistics of waits.
#pragma once

#include <functional>
#include <vector>

#include "deep_ep/low_latency_stats.hpp"
#include "tools/bench/low_latency.hpp"

namespace deep_ep::tools {

/// When the parts of one rank's calls ended, after a barrier of the devices. Seconds, medians of the rounds.
struct RankTimeline {
  double dispatch_sent = 0;
  double dispatched = 0;
  double combine_sent = 0;
  double combined = 0;
};

/// What came out for one number of tokens. By rank.
struct LateRankReport {
  std::int64_t tokens = 0;
  std::vector<LowLatencyStats> stats;
  std::vector<RankTimeline> timelines;
  LowLatencyVerdict verdict;
};

/// Collective over the processes: a dispatch (FP8) and a combine in each round, with statistics; for a
/// trace each in two parts, the second right behind the first. `report` is called on global rank 0's process.
void find_late_rank(const LowLatencyOptions& options, const World& world, Device::Kind device,
                    const std::function<void(const LateRankReport&)>& report);

/// Tables for people.
void print_late_rank(const LateRankReport& report);
nlohmann::json late_rank_json(const LateRankReport& report);

}  // namespace deep_ep::tools
