// `deep_ep env`: which variables have which value here, and why; and the forms in which that is printed.
#pragma once

#include <string>
#include <vector>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

/// A variable of the table, and its value.
struct Assignment {
  const environment::Variable* variable;
  environment::Value value;  ///< in the words of the table
  std::string name;          ///< the variable that is set, or has the default
  std::string text;          ///< its value, in its own words
  std::string source;        ///< "set", "stands for DEEP_EP_RDMA_TRAFFIC_CLASS", "detected: ...", "default"
  std::string problem;       ///< why the library refuses it, or which variables of others it does not understand

  bool refused() const { return source.empty(); }
};

/// One for each variable of the table, in its order.
std::vector<Assignment> assignments_of(const Patient& patient);
/// "GPU 3 (...): no NIC: ..."
std::vector<std::string> gpus_without_nic(const Patient& patient);

/// For POSIX shells, to be sourced any number of times, also under `set -eu`: all but defaults, each name once.
/// InvalidArgument names an own variable that is wrong: a script with it would only carry the mistake on.
std::string to_shell(const Patient& patient);

/// 'text', for a shell.
std::string quoted_for_shell(const std::string& text);

/// docs/reference/environment.md: every variable that the library reads, and what becomes of those that users of other
/// libraries have set.
std::string reference_page();

}  // namespace deep_ep::tools
