// The forms in which `deep_ep env` prints an environment.
#pragma once

#include <string>

#include "tools/env/assignments.hpp"

namespace deep_ep::tools {

/// For POSIX shells, to be sourced any number of times, also under `set -eu`.
std::string to_shell(const Environment& environment, const Profile* profile);
/// Items of the list `env` of a container; `helm`: values of the chart deploy/helm/deep-ep-testbed, the map
/// `workload.env`.
std::string to_yaml(const Environment& environment, const Profile* profile, bool helm);
/// Every variable with its value and where that comes from, defaults as well.
std::string explain(const Environment& environment);

/// 'text', for a shell.
std::string quoted_for_shell(const std::string& text);

}  // namespace deep_ep::tools
