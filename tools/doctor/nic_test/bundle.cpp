// The file to attach to a report of a NIC's test: the doctor's, and what the test found.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tools/doctor/bundle.hpp"
#include "tools/doctor/nic_test/nic_test.hpp"
#include "tools/doctor/tar.hpp"

namespace deep_ep::tools {

void write_bundle(const std::string& file, const Patient& patient, const NicTestReport& report) {
  std::string log;
  for (const std::string& line : report.log) log += line + "\n";
  TarMembers members = bundle_of(patient, check_everything(patient));
  members.emplace_back("report.txt", report.text());
  members.emplace_back("report.json",
                       report.json().dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  members.emplace_back("log.txt", log);
  write_tar(file, "deep_ep_nic_test", members);
}

}  // namespace deep_ep::tools
