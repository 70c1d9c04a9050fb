// `deep_ep bench low-latency --who-is-late` and `--trace`: calls with statistics of waits.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "deep_ep/low_latency_stats.hpp"
#include "tools/bench/low_latency.hpp"

namespace deep_ep::tools {

/// When the parts of one rank's calls ended (dispatch sent, received, combine sent, received), after a barrier of the
/// devices. Microseconds, medians of the rounds.
using PartEnds = std::array<double, 4>;

/// What came out for one number of tokens. By rank.
struct LateRankReport {
  std::int64_t tokens = 0;
  std::vector<LowLatencyStats> stats;
  std::vector<PartEnds> ends_us;
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
