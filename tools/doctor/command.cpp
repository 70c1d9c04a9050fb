// `deep_ep doctor`: what this machine offers for RDMA, what stands in the way, and what to do about it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "csrc/rdma/verbs/libraries.hpp"
#include "deep_ep/error.hpp"
#include "tools/commands.hpp"
#include "tools/common/json_output.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/doctor/counters.hpp"
#include "tools/doctor/print.hpp"

namespace deep_ep::tools {
namespace {

struct DoctorOptions {
  std::string sysroot;
  bool nic_counters = false;
  std::vector<std::string> command;
  bool json = false;
};

/// On this machine the libraries can be opened, which is more than their files can tell.
void check_loaded_libraries(const Patient& patient, Findings& findings) {
  const rdma::verbs::LibraryReport report = rdma::verbs::report_libraries();
  const std::vector<std::string> lines = rdma::verbs::describe(report);
  const bool usable = report.verbs.usable && report.mlx5.usable;
  findings.push_back({"loaded_libraries",
                      usable                 ? Verdict::ok
                      : patient.nics.empty() ? Verdict::note
                                             : Verdict::error,
                      fmt::format("{}", fmt::join(lines, "; ")),
                      usable ? "" : "what cannot be opened here cannot be opened by a run with the same variables",
                      usable || patient.nics.empty() ? "" : "see the findings of the check `libraries`"});
}

int run_doctor(const DoctorOptions& options) {
  if (options.nic_counters == options.command.empty()) {
    throw InvalidArgument(options.nic_counters ? "--nic-counters: the command to run is missing (-- COMMAND ...)"
                                               : "a command goes with --nic-counters");
  }
  const Patient patient =
      examine(options.sysroot.empty() ? topology::SystemRoot() : topology::SystemRoot(options.sysroot),
              environment::of_process, environment::names_of_process());
  Findings findings = check_everything(patient);
  if (patient.root.is_this_machine()) check_loaded_libraries(patient, findings);
  std::vector<PortCounters> traffic;
  if (options.nic_counters) {
    const std::vector<PortCounters> before = read_counters(patient);
    const int status = run_command(options.command, options.json);
    traffic = difference(before, read_counters(patient));
    if (status != 0) {
      findings.push_back({"command", Verdict::error, fmt::format("the command ended with status {}", status),
                          "what was counted may be only a part of its traffic", ""});
    }
    check_traffic(patient, traffic, findings);
  }

  const bool healthy = worst_of(findings) < Verdict::error;
  if (options.json) {
    nlohmann::json report = machine_json(patient);
    report["findings"] = findings_json(findings);
    report["healthy"] = healthy;
    if (options.nic_counters) {
      report["traffic"] = nlohmann::json::array();
      for (const PortCounters& port : traffic) {
        report["traffic"].push_back({{"nic", port.nic}, {"port", port.port}, {"counters", port.values}});
      }
    }
    print_json(report);
  } else {
    fmt::print("{}\n", machine_text(patient));
    if (options.nic_counters) fmt::print("{}\n", to_text(traffic));
    fmt::print("Findings\n{}", to_text(findings));
  }
  return healthy ? 0 : 1;
}

}  // namespace

void add_doctor_command(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("doctor", "Report what this machine offers for RDMA and what stands in the way");
  auto options = std::make_shared<DoctorOptions>();
  command->add_option("--sysroot", options->sysroot, "Examine the files below this folder instead of this machine's");
  command->add_flag("--nic-counters", options->nic_counters,
                    "Run the command after -- and report what each NIC carried meanwhile");
  command->add_option("command", options->command, "With --nic-counters: the command, after --");
  command->add_flag("--json", options->json, "Print JSON");
  command->footer("Exit status: 0 if nothing is wrong (warnings aside), otherwise 1.");
  command->callback([options, &action] { action = [options] { return run_doctor(*options); }; });
}

}  // namespace deep_ep::tools
