// `deep_ep doctor --nic-test`: tests the NICs of this machine, alone or with those of another one, and reports.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "simulation/nic_test/nic_test.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

inline constexpr std::uint16_t kNicTestPort = 18650;

struct NicTestOptions {
  std::string wire = "auto";
  std::string device = "auto";  ///< see choose_device
  bool listen = false;          ///< for the other machine's --peer
  std::string peer = {};        ///< HOST[:PORT] that listens
  std::uint16_t port = kNicTestPort;
  double seconds = 45;  ///< for all of it, and as long again for the other machine to come

  bool between_machines() const { return listen || !peer.empty(); }
};

struct TestedNic {
  std::string name;
  rdma::nic_test::Lines lines;
};

struct NicTestReport {
  std::vector<TestedNic> nics;
  std::vector<std::string> log;  ///< what the library said meanwhile, warnings as "warn: ..."

  int count(rdma::nic_test::Outcome outcome) const;
  /// Nothing has failed, and something has been tested.
  bool well() const { return count(rdma::nic_test::Outcome::fail) == 0 && count(rdma::nic_test::Outcome::pass) != 0; }
  /// The fallbacks that the library took, each once; failures on purpose are none.
  std::vector<std::string> warnings() const;
  std::string text() const;
  nlohmann::json json() const;
};

struct PeerAddress {
  std::string host;
  std::uint16_t port = kNicTestPort;
};
/// "HOST", "HOST:PORT", "[IPv6]:PORT". InvalidArgument. `port`: where the text names none.
PeerAddress parse_peer(const std::string& text, std::uint16_t port = kNicTestPort);

/// InvalidArgument for options that make no sense; failures of NICs are in the report.
NicTestReport test_nics(const Patient& patient, const NicTestOptions& options);

}  // namespace deep_ep::tools
