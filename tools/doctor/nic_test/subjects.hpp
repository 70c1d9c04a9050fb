// Which NICs `deep_ep doctor --nic-test` tests, and how each can be driven.
#pragma once

#include <string>
#include <vector>

#include "csrc/rdma/nic_test/nic_test.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

struct SubjectChoice {
  rdma::WireKind wire = rdma::WireKind::automatic;
  std::string device = "auto";  ///< see choose_device
  bool between_machines = false;
  int rank = 0;  ///< of this side
};

struct Subjects {
  std::vector<rdma::nic_test::Subject> subjects;
  rdma::nic_test::Lines left_out;  ///< NICs and GPUs that cannot be tested, with the reason
};

/// automatic: the NICs, or the wire `local` where there is none. GPUs ring the NICs that the map gives them, each NIC
/// once; without GPUs the CPU does.
Subjects find_subjects(const Patient& patient, const SubjectChoice& choice);

}  // namespace deep_ep::tools
