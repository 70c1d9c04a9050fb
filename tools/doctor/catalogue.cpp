#include "tools/doctor/catalogue.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace deep_ep::tools {
namespace {

using Cost = Check::Cost;

constexpr Check kChecks[] = {
    {"D1", "Driver", "so that the driver runs this program's CUDA, and this program has code for the GPUs", Cost::files,
     check_driver},
    {"D2", "GPUs and NVLink", "so that ranks of one NVLink domain reach each other's memory", Cost::files, check_gpus},
    {"D3", "Limits", "so that memory can be pinned and shared, and files opened", Cost::files, check_limits},
    {"D4", "RDMA devices", "so that every NIC that GPUs shall use is there, with its link up", Cost::files, check_nics},
    {"D5", "GIDs", "so that packets have an address that peers can answer to", Cost::files, check_gids},
    {"D6", "GPU to NIC",
     "so that every GPU has a NIC of its own, near to it, and nothing between them detours by the CPU", Cost::files,
     check_map},
    {"D7", "libibverbs and libmlx5", "so that the copies of both that load are of one release", Cost::deep,
     check_libraries},
    {"D8", "Registration of GPU memory", "so that NICs can read and write GPU memory", Cost::files, check_registration},
    {"D9", "Doorbells", "so that GPUs can start transfers by themselves, without a thread of the host", Cost::files,
     check_doorbell},
    {"D10", "Device files", "so that this process or container may open NICs and GPUs", Cost::files,
     check_device_files},
    {"D11", "GKE", "so that NCCL's plugin gIB starts, and the pod has the RDMA networks it asked for", Cost::files,
     check_gke},
    {"D12", "Environment variables", "so that every variable that is set does what its author meant", Cost::files,
     check_variables},
    {"D13", "Ranks", "so that every rank knows its number, and programs agree whether ranks are nodes or processes",
     Cost::files, check_ranks},
    {"D14", "Rank 0 and clocks", "so that MASTER_ADDR resolves, its port can be reached, and nodes agree on the time",
     Cost::deep, check_meeting},
    {"D15", "Traffic of each NIC", "so that every NIC carries its share; by deep_ep doctor --nic-counters -- COMMAND",
     Cost::command, nullptr},
    {"D16", "Test of each NIC",
     "so that every NIC does what it must, alone or with a peer; by deep_ep doctor --nic-test", Cost::command, nullptr},
    {"D17", "Losses and congestion",
     "so that packets neither get lost nor wait; by deep_ep doctor --nic-counters for a command alone", Cost::files,
     check_counters},
    {"D18", "Libraries of a process", "so that no process has two copies of a library; by deep_ep doctor --pid N",
     Cost::deep, check_process},
    {"D19", "Queue pairs", "so that NICs have enough of them, and of doorbell pages, for all ranks", Cost::deep,
     check_queues},
    {"D20", "Memory for buffers", "so that buffers fit beside the model", Cost::deep, check_memory},
    {"D21", "Place in the cluster", "so that jobs can get nodes that are near to each other", Cost::files,
     check_node_labels},
    {"D22", "Same versions everywhere",
     "so that nodes do not differ in what must be equal; by deep_ep doctor --compare A.json B.json", Cost::command,
     nullptr},
    {"D23", "No compiler", "so that nothing is compiled when a run starts", Cost::files, check_compiler},
    {"D24", "Known trouble", "so that releases that others had trouble with are recognised", Cost::files,
     check_known_bad},
};

}  // namespace

std::span<const Check> all_checks() { return kChecks; }

Findings run_checks(const Patient& patient, Cost most) {
  Findings findings;
  for (const Check& check : kChecks) {
    const std::size_t before = findings.size();
    if (check.cost == Cost::command) {
      findings.push_back(
          {"none", Verdict::skip, std::string(check.meaning.substr(check.meaning.find("; ") + 2)), "", ""});
    } else if (check.cost > most) {
      findings.push_back({"none", Verdict::skip, "left out in a hurry", "", ""});
    } else {
      check.run(patient, findings);
    }
    if (findings.size() == before) {
      findings.push_back({"none", Verdict::skip, "there is nothing here that this is about", "", ""});
    }
    for (std::size_t i = before; i < findings.size(); ++i) findings[i].id = check.id;
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

std::string checks_text(const Findings& findings) {
  std::string text;
  for (const Check& check : kChecks) {
    text += fmt::format("  {:<5}{:<6}{}\n", check.id, word_of(verdict_of(check, findings)), check.title);
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
