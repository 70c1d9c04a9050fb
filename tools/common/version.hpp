// The text of `deep_ep --version`, for everything that reports which build it is.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace deep_ep::tools {

/// One word: the version, and the commit where the build knew it: "0.2.0-g0123456789", "...-dirty" with changes.
std::string full_version();

/// What was built in, as names and texts: "cuda", "gpu code", "transports", "bootstraps", "compiler".
std::vector<std::pair<std::string, std::string>> build_facts();

/// The first line is full_version(), then a line for each fact.
std::string version_text();

}  // namespace deep_ep::tools
