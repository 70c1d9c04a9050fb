// `deep_ep doctor --bundle FILE`: everything that a report of a problem needs, in one text.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

/// What the doctor says, as text and JSON, the variables, versions, the files that the checks read, and the end of the
/// library's log. `more`: further parts, each with its title.
std::string bundle_of(const Patient& patient, const Findings& findings,
                      const std::vector<std::pair<std::string, std::string>>& more = {});

/// A new file that only its owner can read. SystemError where it cannot be made: what lies there already is not written
/// to.
void write_bundle(const std::string& file, const std::string& text);

/// The last `most` bytes of a file, however long it is; empty where there is no such file.
std::string end_of_file(const std::string& path, std::size_t most);

}  // namespace deep_ep::tools
