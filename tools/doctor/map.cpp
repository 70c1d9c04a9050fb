// `deep_ep doctor`: which NIC serves which GPU.
#include <fmt/format.h>

#include <algorithm>

#include "tools/doctor/checks.hpp"
#include "tools/doctor/visible_gpus.hpp"

namespace deep_ep::tools {
namespace {

void check_visible(const Patient& patient, Findings& findings) {
  const auto variable = patient.environment("CUDA_VISIBLE_DEVICES");
  const topology::VisibleGpus visible = topology::visible_gpus(patient.gpus, variable);
  if (!visible.stopped_at.empty()) {
    findings.push_back(
        {"cuda_visible_devices", Verdict::error,
         fmt::format("CUDA_VISIBLE_DEVICES='{}': {}", *variable, visible.stopped_at),
         fmt::format("CUDA shows {} GPU{} to this process", visible.gpus.size(), visible.gpus.size() == 1 ? "" : "s"),
         "correct the list: numbers as in nvidia-smi, or UUIDs, each GPU once"});
    return;
  }
  if (!variable) return;
  std::string list;
  for (std::size_t i = 0; i < visible.gpus.size(); ++i) {
    list += fmt::format("{}CUDA device {} is {}", i == 0 ? "" : ", ", i, patient.gpus[visible.gpus[i]].text());
  }
  findings.push_back({"cuda_visible_devices", Verdict::note,
                      fmt::format("CUDA_VISIBLE_DEVICES={}: {}", *variable, list.empty() ? "no GPU at all" : list),
                      "the map below goes by the GPUs themselves, whatever they are called"});
}

// The maker of virtual machines decides how much of the PCI tree they see.
bool all_equally_far(const rdma::NicMap& map) {
  return std::ranges::all_of(map.rows, [&](const rdma::NicMapRow& row) {
    return !row.nics.empty() && row.nics[0].distance.proximity >= topology::Proximity::host_bridge;
  });
}

}  // namespace

void check_map(const Patient& patient, Findings& findings) {
  if (patient.gpus.empty()) return;
  check_visible(patient, findings);
  if (patient.nics.empty()) return;
  const rdma::NicMap& map = patient.map;
  std::size_t mapped = 0;
  for (std::size_t gpu = 0; gpu < map.rows.size(); ++gpu) {
    mapped += map.rows[gpu].nics.empty() ? 0 : 1;
    if (!map.rows[gpu].nics.empty() || !map.gpus[gpu].cuda_id) continue;
    findings.push_back({"map", Verdict::error, map.line(gpu), "a rank on this GPU cannot use RDMA",
                        map.rows[gpu].problem.starts_with("DEEP_EP_") ? "correct the mapping, or unset it"
                                                                      : "see the errors of the NICs"});
    findings.back().rdma_only = true;
  }
  for (const std::string& warning : map.warnings) {
    const bool told = std::ranges::any_of(findings, [&](const Finding& finding) { return finding.found == warning; });
    if (told) continue;  // by the check of the NICs
    findings.push_back({"map", Verdict::warning, warning});
  }
  if (mapped == map.rows.size() && map.warnings.empty()) {
    findings.push_back({"map", Verdict::ok, fmt::format("each of the {} GPUs has a NIC of its own", mapped)});
  }
  if (mapped > 1 && all_equally_far(map) && patient.settings.mapping.empty()) {
    findings.push_back({"map", Verdict::note, "no GPU shares a PCIe switch with a NIC, as far as this machine shows",
                        "the map goes by the order of PCI addresses where distances are equal",
                        "if the machine's vendor specifies another order, set DEEP_EP_DEVICE_TO_HCA_MAPPING"});
  }
}

}  // namespace deep_ep::tools
