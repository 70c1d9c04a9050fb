// What `deep_ep doctor` finds, and how it is printed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::tools {

enum class Verdict : std::uint8_t {
  ok,
  note,     ///< worth knowing
  warning,  ///< works, but slower or more fragile than it could
  error,    ///< something will not work
};

const char* name_of(Verdict verdict);  ///< "warning"

/// Each says what was found, what that means for a run, and what to do about it. The last is empty where nothing is to
/// be done.
struct Finding {
  std::string check;  ///< a word that scripts may rely on: "nic", "gid", "map", ...
  Verdict verdict = Verdict::ok;
  std::string found;
  std::string meaning;
  std::string action;
};

using Findings = std::vector<Finding>;

Verdict worst_of(const Findings& findings);

/// Text for a terminal: a paragraph for each finding, errors last, so that they are what one sees.
std::string to_text(const Findings& findings);

}  // namespace deep_ep::tools
