// `deep_ep doctor --bundle FILE`: everything that a report of a problem needs.
#pragma once

#include <cstddef>
#include <string>

#include "tools/doctor/checks.hpp"
#include "tools/doctor/tar.hpp"

namespace deep_ep::tools {

/// What the doctor says, as text and JSON, the variables, versions, the files that the checks read, and the end of the
/// library's log.
TarMembers bundle_of(const Patient& patient, const Findings& findings);

/// The last `most` bytes of a file, however long it is; empty where there is no such file.
std::string end_of_file(const std::string& path, std::size_t most);

}  // namespace deep_ep::tools
