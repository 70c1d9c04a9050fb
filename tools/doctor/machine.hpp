// A machine as `deep_ep doctor` describes it: all of it as text, and in a dozen lines for --report and JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

std::string machine_text(const Patient& patient);

struct ReportRow {
  std::string key;    ///< "nic_firmware": for scripts
  std::string title;  ///< "NIC firmware"
  std::string value;
};
using MachineReport = std::vector<ReportRow>;

/// `version`: of this program.
MachineReport report_machine(const Patient& patient, const std::string& version);
std::string to_text(const MachineReport& report);
nlohmann::json to_json(const MachineReport& report);

/// The machine, the checks, the findings and the verdict; `more` stands behind the machine.
std::string examination_text(const Patient& patient, const Findings& findings, const std::string& more = "");
nlohmann::json examination_json(const Patient& patient, const Findings& findings);

}  // namespace deep_ep::tools
