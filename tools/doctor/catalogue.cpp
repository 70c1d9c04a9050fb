#include "tools/doctor/catalogue.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace deep_ep::tools {
namespace {

using Cost = Check::Cost;

constexpr Check kChecks[] = {
    {"D1", "Driver", "so that the driver runs this program's CUDA, and this program has code for the GPUs",
     "there is no NVIDIA GPU", Cost::files, check_driver},
    {"D2", "GPUs and NVLink", "so that ranks of one NVLink domain reach each other's memory",
     "nothing is known of GPUs", Cost::files, check_gpus},
    {"D3", "Limits", "so that memory can be pinned and shared, and files opened", "this machine's files name no limits",
     Cost::files, check_limits},
    {"D4", "RDMA devices", "so that every NIC that GPUs shall use is there, with its link up",
     "nothing is known of NICs", Cost::files, check_nics, true},
    {"D5", "GIDs", "so that packets have an address that peers can answer to", "there is no RDMA device", Cost::files,
     check_gids, true},
    {"D6", "GPU to NIC",
     "so that every GPU has a NIC of its own, near to it, and nothing between them detours by the CPU",
     "there is no GPU, or no RDMA device", Cost::files, check_map},
    {"D7", "libibverbs and libmlx5", "so that the copies of both that load are of one release",
     "neither library is where the loader looks", Cost::deep, check_libraries, true},
    {"D8", "Registration of GPU memory", "so that NICs can read and write GPU memory",
     "there is no GPU, or no RDMA device", Cost::files, check_registration, true},
    {"D9", "Doorbells", "so that GPUs can start transfers by themselves, without a thread of the host",
     "there is no GPU, or no mlx5 device", Cost::files, check_doorbell, true},
    {"D10", "Device files", "so that this process or container may open NICs and GPUs",
     "there is neither a GPU nor an RDMA device", Cost::files, check_device_files},
    {"D11", "GKE", "so that NCCL's plugin gIB starts, and the pod has the RDMA networks it asked for",
     "this is no machine of Google's with RDMA devices, and NCCL_NET is not gIB", Cost::files, check_gke},
    {"D12", "Environment variables", "so that every variable that is set does what its author meant",
     "no variable is set that this library or its neighbours read", Cost::files, check_variables},
    {"D13", "Ranks", "so that every rank knows its number, and programs agree whether ranks are nodes or processes",
     "RANK, WORLD_SIZE and LOCAL_RANK are not set", Cost::files, check_ranks},
    {"D14", "Rank 0 and clocks", "so that MASTER_ADDR resolves, its port can be reached, and nodes agree on the time",
     "MASTER_ADDR is not set, and the kernel says nothing about its clock", Cost::deep, check_meeting},
    {"D15", "Traffic of each NIC", "so that every NIC carries its share; by deep_ep doctor --nic-counters -- COMMAND",
     "deep_ep doctor --nic-counters -- COMMAND", Cost::command, nullptr},
    {"D16", "Test of each NIC",
     "so that every NIC does what it must, alone or with a peer; by deep_ep doctor --nic-test",
     "deep_ep doctor --nic-test", Cost::command, nullptr},
    {"D17", "Losses and congestion",
     "so that packets neither get lost nor wait; by deep_ep doctor --nic-counters for a command alone",
     "no RDMA device counts anything", Cost::files, check_counters},
    {"D18", "Libraries of a process", "so that no process has two copies of a library; by deep_ep doctor --pid N",
     "deep_ep doctor --pid N", Cost::deep, check_process},
    {"D19", "Queue pairs", "so that NICs have enough of them, and of doorbell pages, for all ranks",
     "no RDMA device is used", Cost::deep, check_queues, true},
    {"D20", "Memory for buffers", "so that buffers fit beside the model", "the size of the memory is not known",
     Cost::deep, check_memory},
    {"D21", "Place in the cluster", "so that jobs can get nodes that are near to each other",
     "there is no /etc/podinfo with labels of the node", Cost::files, check_node_labels},
    {"D22", "Same versions everywhere",
     "so that nodes do not differ in what must be equal; by deep_ep doctor --compare A.json B.json",
     "deep_ep doctor --compare A.json B.json", Cost::command, nullptr},
    {"D23", "No compiler", "so that nothing is compiled when a run starts", "", Cost::files, check_compiler},
    {"D24", "Known trouble", "so that releases that others had trouble with are recognised",
     "there is neither a GPU nor an RDMA device", Cost::files, check_known_bad},
};

}  // namespace

std::span<const Check> all_checks() { return kChecks; }

Findings run_checks(const Patient& patient, Cost most) {
  Findings findings;
  for (const Check& check : kChecks) {
    const std::size_t before = findings.size();
    if (check.cost > most && check.cost != Cost::command) {
      findings.push_back({"none", Verdict::skip, "it takes longer than --quick may", "", ""});
    } else if (check.cost != Cost::command) {
      check.run(patient, findings);
    }
    if (findings.size() == before) {
      const char* before_command = check.absent.starts_with("deep_ep ") ? "not asked for: " : "";
      findings.push_back({"none", Verdict::skip, fmt::format("{}{}", before_command, check.absent), "", ""});
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
  const bool rdma_only = fails && std::all_of(findings.begin(), findings.end(), [](const Finding& finding) {
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
    const auto why = std::find_if(findings.begin(), findings.end(), [&](const Finding& finding) {
      return verdict == Verdict::skip && finding.id == check.id;
    });
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

std::string list_of_checks() {
  std::string text;
  for (const Check& check : kChecks) text += fmt::format("{:<5}{}: {}\n", check.id, check.title, check.meaning);
  return text;
}

}  // namespace deep_ep::tools
