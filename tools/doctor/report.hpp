// The findings of `deep_ep doctor`, and how it prints them.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace deep_ep::tools {

enum class Verdict : std::uint8_t {
  skip,  ///< there is nothing here that the check is about, or it was not asked for
  ok,
  note,     ///< worth knowing
  warning,  ///< works, but slower or more fragile than it could
  error,    ///< something will not work
};

const char* name_of(Verdict verdict);  ///< "warning"

/// Each says what was found, what that means for a run, and what to do about it. The last
/// two are empty where there is nothing to say.
struct Finding {
  std::string check;  ///< a word that scripts may rely on: "nic", "gid", "map", ...
  Verdict verdict = Verdict::ok;
  std::string found;
  std::string meaning = {};
  std::string action = {};
  std::string id = {};     ///< of the check that it belongs to: "D5"
  bool rdma_only = false;  ///< an error that stops transfers between machines, and nothing else
};

inline void to_json(nlohmann::json& json, Verdict verdict) { json = name_of(verdict); }
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Finding, id, check, verdict, found, meaning, action)

using Findings = std::vector<Finding>;

Verdict worst_of(const Findings& findings);

/// Text for a terminal: a paragraph for each finding, errors last, so that they are what one sees.
std::string to_text(const Findings& findings);

/// For a terminal: control characters, which other machines' files may hold, become '?'.
std::string printable(std::string text);

}  // namespace deep_ep::tools
