#include "tools/doctor/bundle.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "csrc/rdma/verbs/libraries.hpp"
#include "tools/common/version.hpp"
#include "tools/doctor/catalogue.hpp"
#include "tools/doctor/ethtool.hpp"
#include "tools/doctor/machine_report.hpp"
#include "tools/doctor/print.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::size_t kMostLog = std::size_t{256} << 10;

std::string json_text(const nlohmann::json& value) {
  return value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

/// Files of the machine, by their paths.
std::string files_text(const Patient& patient) {
  std::vector<std::string> files = {"/proc/sys/kernel/osrelease",
                                    "/proc/driver/nvidia/version",
                                    "/proc/driver/nvidia/params",
                                    "/sys/module/nvidia/version",
                                    "/sys/module/mlx5_core/version",
                                    "/sys/module/nvidia_peermem/version",
                                    "/etc/os-release",
                                    "/etc/podinfo/labels",
                                    "/proc/self/limits",
                                    "/proc/self/cgroup"};
  for (const rdma::Nic& nic : patient.nics) {
    for (const rdma::NicPort& port : nic.ports) {
      const std::string folder = fmt::format("/sys/class/infiniband/{}/ports/{}", nic.name, port.number);
      for (const char* counters : {"counters", "hw_counters"}) {
        for (const std::string& name : patient.root.list(folder + "/" + counters)) {
          files.push_back(fmt::format("{}/{}/{}", folder, counters, name));
        }
      }
    }
  }
  std::string text;
  for (const std::string& file : files) {
    if (const auto content = patient.root.read(file)) text += fmt::format("{}: {}\n", file, content->substr(0, 16384));
  }
  return text;
}

/// What `ethtool -S` says of the NICs' interfaces, line by line as the other files.
std::string ethtool_text(const Patient& patient) {
  std::set<std::string> interfaces;
  for (const rdma::Nic& nic : patient.nics) {
    for (const rdma::NicPort& port : nic.ports) {
      if (!port.gids.empty() && !port.gids.front().netdev.empty()) interfaces.insert(port.gids.front().netdev);
    }
  }
  std::string text;
  for (const std::string& interface : interfaces) {
    for (const auto& [name, value] : read_ethtool(patient.root, interface)) {
      text += fmt::format("ethtool {} {}: {}\n", interface, name, value);
    }
  }
  return text;
}

/// The end of the file that this process's variables name, if they name one.
std::string log_text(const Patient& patient) {
  const auto file = patient.environment("DEEP_EP_LOG_FILE");
  if (!file || file->find('%') != std::string::npos || !patient.root.is_this_machine()) return {};
  return end_of_file(*file, kMostLog);
}

}  // namespace

std::string end_of_file(const std::string& path, std::size_t most) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return {};  // to open a pipe would wait for a writer
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file) return {};
  const std::uintmax_t count = std::min<std::uintmax_t>(size, most);
  file.seekg(static_cast<std::streamoff>(size - count));
  std::string text(static_cast<std::size_t>(count), '\0');
  file.read(text.data(), static_cast<std::streamsize>(count));
  text.resize(static_cast<std::size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  return text;
}

TarMembers bundle_of(const Patient& patient, const Findings& findings) {
  const MachineReport report = report_machine(patient, full_version());
  nlohmann::json doctor = machine_json(patient);
  doctor["report"] = to_json(report);
  doctor["checks"] = checks_json(findings);
  doctor["findings"] = findings_json(findings);
  std::string versions = version_text() + "\n";
  for (const std::string& line : rdma::verbs::describe(rdma::verbs::report_libraries())) versions += line + "\n";
  TarMembers members = {{"machine.txt", to_text(report)},
                        {"doctor.txt", machine_text(patient) + "\nChecks\n" + checks_text(findings) + "\nFindings\n" +
                                           to_text(findings) + "Verdict: " + overall_of(patient, findings).text + "\n"},
                        {"doctor.json", json_text(doctor)},
                        {"variables.txt", variables_for_reports()},
                        {"versions.txt", versions},
                        {"files.txt", files_text(patient) + ethtool_text(patient)}};
  if (const std::string log = log_text(patient); !log.empty()) members.emplace_back("library.log", log);
  return members;
}

}  // namespace deep_ep::tools
