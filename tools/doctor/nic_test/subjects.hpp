// Which NICs `deep_ep doctor --nic-test` tests, and how each can be driven.
#pragma once

#include <string>
#include <vector>

#include "tools/doctor/nic_test/nic_test.hpp"

namespace deep_ep::tools {

struct Subjects {
  std::vector<rdma::nic_test::Subject> subjects;
  rdma::nic_test::Lines left_out;  ///< NICs and GPUs that cannot be tested, with the reason

  void leave_out(const std::string& why) { left_out.push_back({"nic", rdma::nic_test::Outcome::skip, why}); }
};

/// The wire `auto`: what DEEP_EP_RDMA_WIRE says; where that is automatic, too, the NICs, or the wire `local` where
/// there is none. `local` and `simulated`: the first GPU, or the CPU. GPUs ring the NICs that the map gives them, each
/// NIC once; without GPUs the CPU does. @throws InvalidArgument.
Subjects find_subjects(const Patient& patient, const NicTestOptions& options);

}  // namespace deep_ep::tools
