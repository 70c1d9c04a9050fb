// All checks of `deep_ep doctor`, each with a number that documents and scripts may rely on.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

struct Check {
  enum class Cost : std::uint8_t {
    files,    ///< reads some small files
    deep,     ///< reads large files, opens libraries, or asks the network, for a bounded time
    command,  ///< needs another command, which `meaning` names
  };
  std::string_view id;       ///< "D5"
  std::string_view title;    ///< "GIDs"
  std::string_view meaning;  ///< why it matters: "so that ..."
  std::string_view absent;   ///< why it is skipped where it finds nothing to say; of a command: how to ask for it
  Cost cost = Cost::files;
  void (*run)(const Patient& patient, Findings& findings) = nullptr;  ///< null where it is another command's
  bool rdma_only = false;  ///< its errors stop transfers between machines, and nothing else
};

/// In the order of their numbers.
std::span<const Check> all_checks();

/// Runs the checks that cost no more than `most` and are not commands. A check that finds nothing to say gets a finding
/// that says so.
Findings run_checks(const Patient& patient, Check::Cost most);

/// The worst verdict of a check's findings; `skip` where there are none.
Verdict verdict_of(const Check& check, const Findings& findings);

/// What all findings mean for a run on this machine, and which checks decide it.
struct Overall {
  std::string verdict;  ///< "works", "works with limits" or "does not work"
  std::vector<std::string> decided_by;
  std::string text;  ///< the last line of the report
};
Overall overall_of(const Patient& patient, const Findings& findings);

/// A line for each check: number, verdict, title, and of a skipped one why.
std::string checks_text(const Findings& findings);
nlohmann::json checks_json(const Findings& findings);
/// For --list-checks: number, title and meaning.
std::string list_of_checks();

}  // namespace deep_ep::tools
