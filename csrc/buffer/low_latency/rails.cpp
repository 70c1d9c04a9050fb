#include "csrc/buffer/low_latency/rails.hpp"

#include <cmath>
#include <string>

#include "csrc/support/environment.hpp"

namespace deep_ep {

LowLatencyRails asked_for_rails(LowLatencyRails asked) {
  if (asked != LowLatencyRails::automatic) return asked;
  const std::string word = environment::choice("DEEP_EP_LOW_LATENCY_RAILS");
  if (word == "always") return LowLatencyRails::always;
  return word == "never" ? LowLatencyRails::never : LowLatencyRails::automatic;
}

RailBytes bytes_between_nodes(const RailTraffic& traffic) {
  const int nodes = traffic.ranks / traffic.ranks_per_node;
  // That at least one of a token's selections falls to one of so many equal parts.
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
