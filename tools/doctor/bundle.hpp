// `deep_ep doctor --bundle FILE`: everything that a report of a problem needs.
#pragma once

#include <string>

#include "tools/doctor/checks.hpp"
#include "tools/doctor/tar.hpp"

namespace deep_ep::tools {

/// What the doctor says, as text and JSON, the variables, versions, the files that the checks read, and the end of the
/// library's log.
TarMembers bundle_of(const Patient& patient, const Findings& findings);

}  // namespace deep_ep::tools
