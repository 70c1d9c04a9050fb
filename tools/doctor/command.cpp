// `deep_ep doctor`: what this machine offers for RDMA, what stands in the way, and what to do about it.
#include <CLI/CLI.hpp>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "csrc/rdma/verbs/libraries.hpp"
#include "csrc/support/format.hpp"
#include "tools/commands.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/json_output.hpp"
#include "tools/common/variables.hpp"
#include "tools/common/version.hpp"
#include "tools/doctor/bundle.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/doctor/counters.hpp"
#include "tools/doctor/explain/explain.hpp"
#include "tools/doctor/machine.hpp"
#include "tools/doctor/nic_test/nic_test.hpp"

namespace deep_ep::tools {
namespace {

struct DoctorOptions {
  std::string sysroot = "/";
  bool nic_counters = false;
  std::vector<std::string> command;
  bool json = false;
  std::optional<std::string> explain;
  bool list_checks = false;
  bool report = false;
  bool quick = false;
  QuickOptions expected;
  bool nic_test = false;
  NicTestOptions test;
  std::string bundle;
};

/// On this machine the libraries can be opened, which is more than their files can tell.
void check_loaded_libraries(const Patient& patient, Findings& findings) {
  bool usable = true;
  std::vector<std::string> lines;
  for (const auto& library : rdma::verbs::report_libraries()) {
    usable &= library.usable();
    lines.push_back(library.text());
  }
  findings.push_back({"loaded_libraries",
                      usable                 ? Verdict::ok
                      : patient.nics.empty() ? Verdict::note
                                             : Verdict::error,
                      fmt::format("{}", fmt::join(lines, "; ")),
                      usable ? "" : "what cannot be opened here cannot be opened by a run with the same variables",
                      usable || patient.nics.empty() ? "" : "see the findings of the check `libraries`", "D7", true});
}

int run_nic_test(const DoctorOptions& options) {
  const Patient patient = examine(topology::SystemRoot(), environment::of_process, tools::names_of_process());
  const NicTestReport report = test_nics(patient, options.test);
  if (options.json) {
    print_json(report.json());
  } else {
    fmt::print("{}", report.text());
  }
  if (!options.bundle.empty()) {
    std::string log;
    for (const std::string& line : report.log) log += line + "\n";
    write_bundle(options.bundle, bundle_of(patient, run_checks(patient), {{"NIC test", report.text()}, {"log", log}}));
  }
  return report.well() ? 0 : 1;
}

int run_quick(const Patient& patient, const QuickOptions& options, bool json) {
  const QuickAnswer answer = answer_quickly(patient, options);
  if (json) {
    print_json({{"usable", answer.usable},
                {"summary", answer.line},
                {"checks", checks_json(answer.findings)},
                {"findings", answer.findings}});
  } else {
    fmt::print("{}\n", printable(answer.line));
  }
  return answer.usable ? 0 : 1;
}

int run_doctor(const DoctorOptions& options) {
  if (options.list_checks) {
    for (const Check& check : all_checks()) fmt::print("{:<5}{}: {}\n", check.id, check.title, check.meaning);
    return 0;
  }
  if (options.explain) return run_explain(*options.explain, options.json);
  if (options.nic_test) return run_nic_test(options);
  const Patient patient =
      examine(topology::SystemRoot(options.sysroot), environment::of_process, tools::names_of_process());
  if (options.quick) return run_quick(patient, options.expected, options.json);
  if (options.report) {
    const MachineReport machine = report_machine(patient, full_version());
    options.json ? print_json(to_json(machine)) : fmt::print("{}", printable(to_text(machine)));
    return 0;
  }
  Findings findings = run_checks(patient);
  if (patient.root.is_this_machine()) check_loaded_libraries(patient, findings);
  std::vector<PortCounters> traffic;
  if (options.nic_counters) {
    const std::vector<PortCounters> before = read_counters(patient);
    const int status = run_command(options.command, options.json);
    traffic = difference(before, read_counters(patient));
    if (status != 0) {
      findings.push_back({"command", Verdict::error, fmt::format("the command ended with status {}", status),
                          "what was counted may be only a part of its traffic", "", "D15"});
    }
    const std::size_t counted = findings.size();
    check_traffic(patient, traffic, findings);
    for (std::size_t i = counted; i < findings.size(); ++i) findings[i].id = "D15";
  }

  if (!options.bundle.empty()) write_bundle(options.bundle, bundle_of(patient, findings));
  if (options.json) {
    nlohmann::json all = examination_json(patient, findings);
    if (options.nic_counters) all["traffic"] = nlohmann::json::array();
    for (const PortCounters& port : traffic) {
      all["traffic"].push_back({{"nic", port.nic}, {"port", port.port}, {"counters", port.values}});
    }
    print_json(all);
  } else {
    fmt::print("{}", examination_text(patient, findings, options.nic_counters ? to_text(traffic) + "\n" : ""));
  }
  return worst_of(findings) < Verdict::error ? 0 : 1;
}

}  // namespace

void add_doctor_command(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("doctor", "Report what this machine offers for RDMA and what stands in the way");
  auto options = std::make_shared<DoctorOptions>();
  CLI::Option* sysroot = command->add_option("--sysroot", options->sysroot,
                                             "Examine the files below this folder instead of this machine's");
  CLI::Option* counters = command->add_flag("--nic-counters", options->nic_counters,
                                            "Run the command after -- and report what each NIC carried meanwhile");
  counters->needs(
      command->add_option("command", options->command, "With --nic-counters: the command, after --")->needs(counters));
  command->add_flag("--json", options->json, "Print JSON");
  CLI::Option* explain = command->add_option(
      "--explain", options->explain,
      "Explain an error message of this library, NCCL, NVSHMEM, libibverbs, CUDA or Kubernetes: its cause "
      "and what to do; - reads it from standard input");
  CLI::Option* list =
      command->add_flag("--list-checks", options->list_checks, "List the checks: number, title, and why it matters");
  CLI::Option* report =
      command->add_flag("--report", options->report, "The machine in a dozen lines: GPUs, NICs, driver, versions");
  CLI::Option* quick = command->add_flag("--quick", options->quick,
                                         "One line, from files alone: is this machine usable? For readiness probes");
  add_number(*command, "--gpus", options->expected.gpus, 0, 1024, "With --quick: not usable with fewer GPUs")
      ->needs(quick);
  add_number(*command, "--nics", options->expected.nics, 0, 1024,
             "With --quick: not usable with fewer usable RDMA devices")
      ->needs(quick);
  CLI::Option* test = command->add_flag("--nic-test", options->nic_test,
                                        "Test all that this machine's NICs have to do, in less than a minute");
  NicTestOptions& nic_test = options->test;
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->needs(test);
  };
  add("--wire", nic_test.wire,
      "verbs: NICs; local: copies within this machine; simulated[:key=value,...]: a kernel that plays a NIC; auto: "
      "DEEP_EP_RDMA_WIRE, otherwise NICs where there are any")
      ->capture_default_str();
  add("--device", nic_test.device, "Who rings: auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command
      ->add_flag("--listen", nic_test.listen, "Test together with another machine, which names this one as its --peer")
      ->needs(test);
  add("--port", nic_test.port, "TCP port to listen on, or to call with --peer HOST")
      ->check(CLI::Range(1, 65535))
      ->capture_default_str();
  add("--peer", nic_test.peer, "HOST[:PORT]: test together with the machine that listens there");
  add("--seconds", nic_test.seconds, "How long all tests may take; a larger number also makes each wait longer")
      ->check(CLI::Range(1.0, 3600.0))
      ->capture_default_str();
  CLI::Option* bundle = command->add_option(
      "--bundle", options->bundle, "Also write everything into a new file, to attach to a report of a problem");
  // One of these at a time; bundles are made by the last two, and by the whole examination.
  const std::array modes = {list, explain, quick, report, test, counters};
  for (std::size_t one = 0; one < modes.size(); ++one) {
    for (std::size_t other = one + 1; other < modes.size(); ++other) modes[one]->excludes(modes[other]);
    if (one < 4) modes[one]->excludes(bundle);
  }
  test->excludes(sysroot);
  command->footer(
      "Exit status: 0 if nothing is wrong (warnings aside), no test has failed, the machine is usable (--quick), the "
      "text is known (--explain); otherwise 1.");
  command->callback([options, &action] { action = [options] { return run_doctor(*options); }; });
}

}  // namespace deep_ep::tools
