// Measures dispatch and combine inside one node, with what other means need for the same bytes, or between nodes.
#pragma once

#include <string>
#include <vector>

#include "tools/bench/options.hpp"

namespace deep_ep::tools {

struct NormalModeOptions : BenchOptions {
  std::vector<int> sms;       ///< 0 = the library's default
  int window_mib = 0;         ///< of the buffer, 0 = the library's default
  std::vector<int> warps{0};  ///< of a block; 0 = the library's default
  std::string mode = "both";  ///< of combine: pull, push, both
  int nodes = 1;              ///< of equally many ranks; several: ranks of this host play them
  int groups = 0;             ///< nodes that a token's experts may be on, 0 = all
  bool peers = true;          ///< inside a node
  bool tune = false;          ///< several numbers of SMs
  bool uncached = true;       ///< also layout, and dispatch that exchanges counts
};

/// Collective over the processes. `setting`: what all figures have in common. Throws when --check finds a difference.
/// Operations are "layout", "dispatch", "layout+notify+dispatch" and "combine"; modes of dispatch "cached" and
/// "exchange", of combine "pull" and "push", between nodes "in heap" and "copied".
void run_normal_mode(const NormalModeOptions& options, const World& world, Device::Kind device, const Figure& setting,
                     const FigureReport& report);

}  // namespace deep_ep::tools
