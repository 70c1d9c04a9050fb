#include "tools/doctor/quick.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tools/common/json_output.hpp"
#include "tools/doctor/catalogue.hpp"
#include "tools/doctor/print.hpp"

namespace deep_ep::tools {
namespace {

bool is_usable(const rdma::Nic& nic) {
  return nic.capability != rdma::Capability::unsupported && nic.accessible &&
         std::any_of(nic.ports.begin(), nic.ports.end(), [](const rdma::NicPort& port) { return port.active(); });
}

void expect(const char* what, const char* option, std::ptrdiff_t found, int wanted, Findings& findings) {
  if (found >= wanted) return;
  findings.push_back({"expected", Verdict::error,
                      fmt::format("{} {} here, {} {} expected", found, what, option, wanted),
                      "this machine has less than its jobs count on", "the checks above, or another number"});
}

}  // namespace

QuickAnswer answer_quickly(const Patient& patient, const QuickOptions& options) {
  QuickAnswer answer;
  answer.findings = run_checks(patient, Check::Cost::files);
  const auto gpus =
      std::count_if(patient.gpus.begin(), patient.gpus.end(), [](const auto& gpu) { return gpu.cuda_id; });
  const auto nics = std::count_if(patient.nics.begin(), patient.nics.end(), is_usable);
  expect("GPUs are", "--gpus", gpus, options.gpus, answer.findings);
  expect("RDMA devices are usable", "--nics", nics, options.nics, answer.findings);

  std::string errors;
  std::size_t warnings = 0;
  for (const Finding& finding : answer.findings) {
    warnings += finding.verdict == Verdict::warning ? 1 : 0;
    if (finding.verdict != Verdict::error) continue;
    errors +=
        fmt::format("{}{}{}{}", errors.empty() ? "" : "; ", finding.id, finding.id.empty() ? "" : " ", finding.found);
  }
  answer.usable = errors.empty();
  answer.line = answer.usable ? fmt::format("usable: {} GPUs, {} RDMA devices, {} warning{}", gpus, nics, warnings,
                                            warnings == 1 ? "" : "s")
                              : fmt::format("not usable: {}", errors);
  return answer;
}

int run_quick(const Patient& patient, const QuickOptions& options, bool json) {
  const QuickAnswer answer = answer_quickly(patient, options);
  if (json) {
    print_json({{"usable", answer.usable},
                {"summary", answer.line},
                {"checks", checks_json(answer.findings)},
                {"findings", findings_json(answer.findings)}});
  } else {
    fmt::print("{}\n", printable(answer.line));
  }
  return answer.usable ? 0 : 1;
}

}  // namespace deep_ep::tools
