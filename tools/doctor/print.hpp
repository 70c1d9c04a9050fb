// What a machine looks like to `deep_ep doctor`, as text and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

std::string machine_text(const Patient& patient);
nlohmann::json machine_json(const Patient& patient);
nlohmann::json findings_json(const Findings& findings);

/// For a terminal: control characters, which other machines' files may hold, become '?'.
std::string printable(std::string text);

}  // namespace deep_ep::tools
