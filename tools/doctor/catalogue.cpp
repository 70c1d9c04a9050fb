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
    {"D6", "GPU to NIC", "so that every GPU has a NIC of its own, near to it", Cost::files, check_map},
    {"D7", "libibverbs and libmlx5", "so that the copies of both that load are of one release", Cost::deep,
     check_libraries},
    {"D8", "Registration of GPU memory", "so that NICs can read and write GPU memory", Cost::files, check_registration},
    {"D9", "Doorbells", "so that GPUs can start transfers by themselves, without a thread of the host", Cost::files,
     check_doorbell},
    {"D10", "Device files", "so that this process or container may open NICs and GPUs", Cost::files,
     check_device_files},
    {"D12", "Environment variables", "so that every variable that is set does what its author meant", Cost::files,
     check_variables},
};

}  // namespace

std::span<const Check> all_checks() { return kChecks; }

Findings run_checks(const Patient& patient, Cost most) {
  Findings findings;
  for (const Check& check : kChecks) {
    if (check.cost == Cost::command || check.cost > most) continue;
    const std::size_t before = findings.size();
    check.run(patient, findings);
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
