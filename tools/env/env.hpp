// `deep_ep env`: which variables have which value here, and why; and the forms in which that is printed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

/// Why a variable has its value. The first origin in this list wins.
enum class Origin : std::uint8_t {
  variable,  ///< the library's own variable is set
  alias,     ///< a variable of another library is set, and honoured
  detected,  ///< from this machine's files
  standard,  ///< the default
};

struct Assignment {
  std::string name;
  std::string value;
  Origin origin = Origin::standard;
  std::string source;  ///< in words: "set", "stands for DEEP_EP_RDMA_TRAFFIC_CLASS", "default"
};

struct Environment {
  std::vector<Assignment> rows;  ///< one for each row of the table, in its order; defaults as well
  std::vector<std::string> notes;
};

/// InvalidArgument names an own variable that is wrong: a script with it would only carry the mistake on.
Environment environment_of(const Patient& patient);

/// For POSIX shells, to be sourced any number of times, also under `set -eu`: all but defaults, each name once.
std::string to_shell(const Environment& environment);
/// Every variable with its value and where that comes from, defaults as well.
std::string explain(const Environment& environment);

/// 'text', for a shell.
std::string quoted_for_shell(const std::string& text);

/// docs/reference/environment.md: every variable that the library reads, and what becomes of those that users of other
/// libraries have set.
std::string reference_page();

}  // namespace deep_ep::tools
