// `deep_ep bench wire`: what NICs carry when GPUs write through this library's own queue pairs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tools/bench/output/figure.hpp"
#include "tools/doctor/nic_test/subjects.hpp"

namespace deep_ep::tools {

struct WireOptions {
  std::vector<std::string> nics;  ///< names, with or without the port; empty: all
  std::string wire = "auto";      ///< auto: NICs and nothing else
  std::string device = "auto";
  double seconds = 1;  ///< of each measurement
};

/// What there is to measure. @throws Error that says why there is nothing; InvalidArgument for a NIC that is not there.
std::vector<rdma::nic_test::Subject> wire_subjects(const Patient& patient, const WireOptions& options);

/// Each NIC alone: round trips, fetch-adds, writes over 1 to 8 queue pairs; then, if there are several, all at once.
/// Each NIC talks to itself, out of the GPU's memory and back. `report` hears of each figure as it is measured.
/// @throws Error where a NIC fails, or data was wrong.
void run_wire(const std::vector<rdma::nic_test::Subject>& subjects, double seconds,
              const std::function<void(const Figure&)>& report);

}  // namespace deep_ep::tools
