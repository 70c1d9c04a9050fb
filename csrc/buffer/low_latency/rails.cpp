#include "csrc/buffer/low_latency/rails.hpp"

#include <cmath>
#include <string>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

LowLatencyRails asked_for_rails(LowLatencyRails asked) {
  if (asked != LowLatencyRails::automatic) return asked;
  const std::string word = environment::choice("DEEP_EP_LOW_LATENCY_RAILS");
  if (word == "always") return LowLatencyRails::always;
  return word == "never" ? LowLatencyRails::never : LowLatencyRails::automatic;
}

LowLatencyReach LowLatencyReach::find(const BufferOptions& options, const NodeMembership& nodes) {
  LowLatencyReach reach;
  if (options.low_latency.bytes == 0) return reach;
  reach.far = nodes.reached_by_rdma(options.low_latency.allow_nvlink);
  reach.rails_always = options.low_latency.rails == LowLatencyRails::always;
  if (options.low_latency.lanes != 0) reach.lanes = options.low_latency.lanes;
  if (options.low_latency.rails == LowLatencyRails::never) {
    reach.why_no_rails = "as asked for";
  } else if (!options.low_latency.allow_nvlink) {
    reach.why_no_rails = "as NVLink is not allowed";
  } else if (reach.far.empty()) {
    reach.why_no_rails = "as there is one node";
  } else if (options.low_latency.masking) {
    reach.why_no_rails = "as ranks may be masked";
  } else if (nodes.ranks_of_each_node() < 2) {
    reach.why_no_rails = "as nodes are not all of equally many consecutive ranks, two or more";
  } else {
    reach.rail_width = nodes.ranks_of_each_node();
  }
  return reach;
}

std::string LowLatencyReach::describe_rails() const {
  if (rail_width == 0) return fmt::format("not by rails, {}", why_no_rails);
  return fmt::format("by rails between nodes of {} ranks {}", rail_width, rails_always ? "always" : "where they pay");
}

RailBytes bytes_between_nodes(const RailTraffic& traffic) {
  const int nodes = traffic.ranks / traffic.ranks_per_node;
  // The probability that at least one of a token's selections falls to one of so many equal parts.
  const auto selected = [&](int parts) { return 1 - std::pow(1 - 1.0 / parts, traffic.topk); };
  const auto bytes_of = [&](double rows, std::size_t row_bytes) {
    return traffic.max_tokens * rows * static_cast<double>(row_bytes);
  };
  const double other_ranks = traffic.ranks - traffic.ranks_per_node;
  const double other_nodes = nodes - 1;
  return {.direct = bytes_of(other_ranks * selected(traffic.ranks), traffic.row_bytes),
          .by_rails = bytes_of(other_nodes * selected(nodes), traffic.rail_row_bytes)};
}

bool rails_pay(const RailTraffic& traffic) {
  constexpr double kNicBytesPerNs = 50;  // a 400 Gbit/s port
  constexpr double kHopNs = 5000;        // what a call within a node takes beyond its bytes
  const RailBytes bytes = bytes_between_nodes(traffic);
  return bytes.direct - bytes.by_rails > kHopNs * kNicBytesPerNs;
}

}  // namespace deep_ep
