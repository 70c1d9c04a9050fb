// `deep_ep doctor --quick`: is this machine usable? For readiness probes: files alone, no process, one line.
#pragma once

#include <string>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

struct QuickOptions {
  int gpus = 0;  ///< as many must be there at least
  int nics = 0;  ///< as many RDMA devices must be usable at least
};

struct QuickAnswer {
  bool usable = false;
  std::string line;
  Findings findings;
};
QuickAnswer answer_quickly(const Patient& patient, const QuickOptions& options);

int run_quick(const Patient& patient, const QuickOptions& options, bool json);

}  // namespace deep_ep::tools
