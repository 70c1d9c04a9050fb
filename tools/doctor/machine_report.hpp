// `deep_ep doctor --report`: a machine in a dozen lines, for tables and for comparing nodes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/doctor/report.hpp"

namespace deep_ep::tools {

struct Patient;

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

/// What nodes differ in; each is a file with the JSON of `doctor --json` or `doctor --report --json`. InvalidArgument
/// where a file is neither.
struct NodeReport {
  std::string file;
  nlohmann::json report;  ///< key to value
};
NodeReport read_node_report(const std::string& file);
Findings compare_nodes(const std::vector<NodeReport>& nodes);

/// The commands.
int run_compare(const std::vector<std::string>& files, bool json);

}  // namespace deep_ep::tools
