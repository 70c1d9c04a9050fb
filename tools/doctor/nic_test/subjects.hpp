// Which NICs `deep_ep doctor --nic-test` tests, and how each can be driven.
#pragma once

#include <string>
#include <vector>

#include "simulation/nic_test/judge.hpp"
#include "simulation/nic_test/nic_test.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

struct SubjectChoice {
  rdma::WireSetting wire = {};
  std::string device = "auto";  ///< see choose_device
  bool between_machines = false;
  /// Seconds that NICs try to reach a peer, so that they say why they cannot before this test is tired of waiting.
  double retry_s = 7.5;
};

struct Subjects {
  std::vector<rdma::nic_test::Subject> subjects;
  rdma::nic_test::Lines left_out;  ///< NICs and GPUs that cannot be tested, with the reason

  void leave_out(const std::string& why) { left_out.push_back(rdma::nic_test::skipped("nic", why)); }
};

/// Of the option --wire. @throws InvalidArgument.
rdma::WireSetting wire_of(const std::string& text);

/// The path with a time-out by which a NIC that gets no answer gives up within `seconds`, if it is not shorter anyway.
rdma::PathOptions giving_up_within(rdma::PathOptions path, double seconds);

/// automatic: what DEEP_EP_RDMA_WIRE says; where that is automatic, too, the NICs, or the wire `local` where there is
/// none. `local` and `simulated`: the first GPU, or the CPU. GPUs ring the NICs that the map gives them, each NIC once;
/// without GPUs the CPU does.
Subjects find_subjects(const Patient& patient, const SubjectChoice& choice);

}  // namespace deep_ep::tools
