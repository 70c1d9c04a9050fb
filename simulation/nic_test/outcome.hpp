// What the NIC test finds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deep_ep::rdma::nic_test {

enum class Outcome : std::uint8_t { pass, skip, fail };

/// One line of the report.
struct Line {
  std::string check;  ///< a word that scripts may rely on: "entries", "way", "nic", ...
  Outcome outcome = Outcome::pass;
  std::string found = {};    ///< what was seen, with figures; of a check that was left out, why
  std::string meaning = {};  ///< of a failure: what that does to a run
  std::string action = {};   ///< of a failure: what to do
};

using Lines = std::vector<Line>;

/// What may keep a NIC from the rate of its port.
struct Link {
  double gbps = 0;            ///< of the port; 0: not known
  bool is_judged = false;     ///< kernels ring the NIC, so that nothing but what follows keeps it from that rate
  double pcie_gbps = 0;       ///< lanes times speed, as they are now; 0: not known
  double pcie_best_gbps = 0;  ///< of which the NIC is capable
  int interface_mtu = 0;      ///< of the Ethernet interface; 0: none
  bool virtual_machine = false;
  bool relaxed_ordering = false;  ///< payload may come in any order
};

}  // namespace deep_ep::rdma::nic_test
