#include "tools/doctor/checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/version.hpp"

namespace deep_ep::tools {
namespace {

// A number that is missing was that of a check which is gone: it is not given again.
constexpr Check kChecks[] = {
    {"D1", "Driver", "so that the driver runs this program's CUDA, and this program has code for the GPUs",
     "there is no NVIDIA GPU", check_driver},
    {"D2", "GPUs", "so that ranks have GPUs of one kind, and may share memory over NVLink between nodes",
     "nothing is known of GPUs", check_gpus},
    {"D3", "Limits", "so that memory can be pinned and shared, and files opened", "this machine's files name no limits",
     check_limits},
    {"D4", "RDMA devices", "so that every NIC that GPUs shall use is there, with its link up",
     "nothing is known of NICs", check_nics, true},
    {"D5", "GIDs", "so that packets have an address that peers can answer to", "there is no RDMA device", check_gids,
     true},
    {"D6", "GPU to NIC", "so that every GPU has a NIC of its own, near to it", "there is no GPU, or no RDMA device",
     check_map},
    {"D7", "libibverbs and libmlx5", "so that the copies of both that load are of one release",
     "neither library is where the loader looks", check_libraries, true, true},
    {"D8", "Registration of GPU memory", "so that NICs can read and write GPU memory",
     "there is no GPU, or no RDMA device", check_registration, true},
    {"D9", "Doorbells", "so that GPUs can start transfers by themselves, without a thread of the host",
     "there is no GPU, or no mlx5 device", check_doorbell, true},
    {"D10", "Device files", "so that this process or container may open NICs and GPUs",
     "there is neither a GPU nor an RDMA device", check_device_files},
    {"D11", "GKE", "so that NCCL's plugin gIB starts, and the pod has the RDMA networks it asked for",
     "neither gIB nor RDMA networks were asked for", check_gke},
    {"D12", "Environment variables", "so that every variable that is set does what its author meant",
     "no variable is set that this library or its neighbours read", check_variables},
    {"D15", "Traffic of each NIC",
     "so that every NIC carries its share and loses nothing; by deep_ep doctor --nic-counters -- COMMAND",
     "deep_ep doctor --nic-counters -- COMMAND"},
    {"D16", "Test of each NIC",
     "so that every NIC does what it must, alone or with a peer; by deep_ep doctor --nic-test",
     "deep_ep doctor --nic-test"},
};

BuiltFor built_for() {
  BuiltFor build;
  for (const auto& [name, fact] : build_facts()) {
    if (fact.starts_with("none")) continue;
    if (name == "cuda") build.cuda = fact;
    if (name != "gpu code") continue;
    for (const std::string_view architecture : split(fact, ' ')) {
      if (!architecture.empty()) build.architectures.emplace_back(architecture);
    }
  }
  return build;
}

bool is_usable(const rdma::Nic& nic) {
  return nic.capability != rdma::Capability::unsupported && nic.accessible &&
         std::ranges::any_of(nic.ports, [](const rdma::NicPort& port) { return port.active(); });
}

void expect(const char* what, const char* option, std::ptrdiff_t found, int wanted, Findings& findings) {
  if (found >= wanted) return;
  findings.push_back({"expected", Verdict::error,
                      fmt::format("{} {} here, {} {} expected", found, what, option, wanted),
                      "this machine has less than its jobs count on", "the checks above, or another number"});
}

}  // namespace

Patient examine(topology::SystemRoot root, environment::Source variables, const std::vector<std::string>& names) {
  Patient patient;
  patient.root = std::move(root);
  patient.environment = std::move(variables);
  patient.variable_names = names;
  patient.gpus = topology::find_gpus(patient.root);
  patient.nics = rdma::find_nics(patient.root);
  patient.build = built_for();
  try {
    patient.settings = rdma::read_settings(patient.environment);
  } catch (const InvalidArgument&) {  // NOLINT(bugprone-empty-catch): check_variables() says it
  }
  patient.map = rdma::map_gpus_to_nics(patient.gpus, patient.nics, patient.settings);
  return patient;
}

std::span<const Check> all_checks() { return kChecks; }

Findings run_checks(const Patient& patient, bool quickly) {
  Findings findings;
  for (const Check& check : kChecks) {
    const std::size_t before = findings.size();
    const bool left_out = check.slow && quickly;
    if (check.run != nullptr && !left_out) check.run(patient, findings);
    if (findings.size() == before) {
      findings.push_back({"none", Verdict::skip,
                          left_out               ? "it takes longer than --quick may"
                          : check.run == nullptr ? fmt::format("not asked for: {}", check.absent)
                                                 : std::string(check.absent)});
    }
    for (std::size_t i = before; i < findings.size(); ++i) {
      findings[i].id = check.id;
      findings[i].rdma_only = findings[i].rdma_only || check.rdma_only;
    }
  }
  return findings;
}

Verdict verdict_of(const Check& check, const Findings& findings) {
  Verdict verdict = Verdict::skip;
  for (const Finding& finding : findings) {
    if (finding.id == check.id) verdict = std::max(verdict, finding.verdict);
  }
  return verdict;
}

const char* word_of(Verdict verdict) {
  constexpr const char* kWords[] = {"skip", "ok", "ok", "warn", "fail"};
  return kWords[static_cast<std::size_t>(verdict)];
}

Overall overall_of(const Patient& patient, const Findings& findings) {
  const Verdict worst = worst_of(findings);
  const bool fails = worst == Verdict::error;
  const bool on_cpu = patient.gpus.empty() && !fails;
  Overall overall{fails                                 ? "does not work"
                  : worst == Verdict::warning || on_cpu ? "works with limits"
                                                        : "works",
                  {},
                  ""};
  std::string names;
  for (const Check& check : kChecks) {
    const bool no_gpu = on_cpu && check.id == "D2";
    if (!no_gpu && (worst < Verdict::warning || verdict_of(check, findings) != worst)) continue;
    overall.decided_by.emplace_back(check.id);
    names += fmt::format("{}{} {}", names.empty() ? ": " : ", ", check.id,
                         no_gpu ? "no GPU (kernels run on the CPU)" : check.title);
  }
  const bool rdma_only = fails && std::ranges::all_of(findings, [](const Finding& finding) {
                           return finding.verdict != Verdict::error || finding.rdma_only;
                         });
  overall.text = fmt::format("{}{}{}{}", overall.verdict, rdma_only ? " between machines" : "", names,
                             rdma_only ? "; works within this machine" : "");
  return overall;
}

std::string checks_text(const Findings& findings) {
  std::string text;
  for (const Check& check : kChecks) {
    const Verdict verdict = verdict_of(check, findings);
    text += fmt::format("  {:<5}{:<6}{}", check.id, word_of(verdict), check.title);
    const auto why = std::ranges::find_if(
        findings, [&](const Finding& finding) { return verdict == Verdict::skip && finding.id == check.id; });
    if (why != findings.end()) text += fmt::format(" ({})", why->found);
    text += '\n';
  }
  return text;
}

nlohmann::json checks_json(const Findings& findings) {
  nlohmann::json list = nlohmann::json::array();
  for (const Check& check : kChecks) {
    list.push_back({{"id", check.id},
                    {"title", check.title},
                    {"verdict", word_of(verdict_of(check, findings))},
                    {"meaning", check.meaning}});
  }
  return list;
}

QuickAnswer answer_quickly(const Patient& patient, const QuickOptions& options) {
  QuickAnswer answer;
  answer.findings = run_checks(patient, true);
  const auto gpus = std::ranges::count_if(patient.gpus, [](const auto& gpu) { return gpu.cuda_id.has_value(); });
  const auto nics = std::ranges::count_if(patient.nics, is_usable);
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

int major_of(std::string_view version) {
  int major = 0;
  std::from_chars(version.data(), version.data() + version.size(), major);
  return major;
}

}  // namespace deep_ep::tools
