// From what a run of the NIC test saw to a line of its report.
#pragma once

#include <string>
#include <vector>

#include "simulation/nic_test/bench.hpp"
#include "simulation/nic_test/outcome.hpp"

namespace deep_ep::rdma::nic_test {

/// `name`: of the check. `must_wrap`: more entries than the 16-bit index counts were wanted.
Line judge_entries(const std::string& name, const Run& run, bool must_wrap);
Line judge_litmus(const Run& run);
Line judge_additions(const Run& run);
Line judge_wrong_key(const Run& run);

/// Runs of more and more pairs. A failure below 80 % of the port's rate, if it is judged: which of PCIe, MTU, ordering
/// and ATS is the likely cause.
Line judge_bandwidth(const std::vector<Run>& runs, const Link& link);

}  // namespace deep_ep::rdma::nic_test
