#include "csrc/buffer/low_latency/lanes.hpp"

#include <algorithm>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "kernels/low_latency/window.hpp"

namespace deep_ep {

void check_lanes(int asked) {
  if (asked == 0 || asked == 1 || asked == 2 || asked == kMostLowLatencyLanes) return;
  fail<InvalidArgument>("low_latency.lanes is {}, allowed: 1, 2, {}, or 0 for DEEP_EP_LOW_LATENCY_LANES", asked,
                        kMostLowLatencyLanes);
}

int asked_for_lanes(int asked) {
  check_lanes(asked);
  if (asked != 0) return asked;
  const std::string word = environment::choice("DEEP_EP_LOW_LATENCY_LANES");
  return parse_number<int>(word).value_or(0);  // auto
}

int lanes_for(const LaneFacts& facts) {
  constexpr int kWantedFlows = 32;
  int lanes = 1;
  while (facts.keeps_to_path && facts.far != 0 && lanes < kMostLowLatencyLanes && facts.far * lanes < kWantedFlows) {
    lanes *= 2;
  }
  return lanes;
}

int lanes_of_all(const LowLatencyOptions& options, NodeMembership nodes, const std::vector<bool>& keeps_to_path) {
  int lanes = 1;
  for (nodes.rank = 0; nodes.rank < static_cast<int>(nodes.node.size()); ++nodes.rank) {
    const int far = static_cast<int>(nodes.reached_by_rdma(options.allow_nvlink).size());
    lanes =
        std::max(lanes, lanes_for({.far = far, .keeps_to_path = keeps_to_path[static_cast<std::size_t>(nodes.rank)]}));
  }
  return lanes;
}

}  // namespace deep_ep
