// What DEEP_EP_RDMA_WIRE says.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace deep_ep::rdma {

/// What carries RDMA traffic.
enum class WireKind : std::uint8_t {
  automatic,
  local,      ///< copies between heaps on one host, by a thread of each rank
  verbs,      ///< a NIC
  simulated,  ///< a kernel on each GPU that plays the NIC, on one host
};
std::string_view name_of(WireKind kind);

/// How the wire `simulated` behaves.
struct SimulatedNic {
  std::optional<double> gb_per_s = {};    ///< 0: as fast as it goes. Not said: 50 on GPUs, 0 on the CPU
  std::optional<double> latency_us = {};  ///< until a peer sees a message. Not said: 3 on GPUs, 0 on the CPU
  std::uint32_t overhead_bytes = 64;      ///< that a message takes on the line besides its own
  std::uint32_t most_adds = 16;           ///< additions of a queue pair under way
  double reorder_us = 0;                  ///< pieces of payload are held up for different times below this
  double completion_us = 0;               ///< completions are held up for different times below this
  /// That a NIC takes, 1 or 2. Not said: 2 on GPUs where messages are long, else 1.
  std::optional<int> multiprocessors = {};

  bool operator==(const SimulatedNic&) const = default;
};

struct WireSetting {
  WireKind kind = WireKind::automatic;
  SimulatedNic nic;
};

/// "auto", "local", "verbs", or "simulated", which may be followed by ":key=value,..."; InvalidArgument says what is
/// wrong and what is allowed.
WireSetting parse_wire(std::string_view text);

}  // namespace deep_ep::rdma
