// `deep_ep env`: which variables have which value here, and why; and the forms in which that is printed.
#pragma once

#include <string>
#include <vector>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

/// "GPU 3 (...) -> no NIC: ..."
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
