// `deep_ep doctor`: which NIC serves which GPU.
#include <fmt/format.h>

#include <algorithm>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

// The maker of virtual machines decides how much of the PCI tree they see.
bool all_equally_far(const rdma::NicMap& map) {
  return std::ranges::all_of(map.rows, [&](const rdma::NicMapRow& row) {
    return !row.nics.empty() && row.nics[0].distance.proximity >= topology::Proximity::host_bridge;
  });
}

}  // namespace

void check_map(const Patient& patient, Findings& findings) {
  if (patient.gpus.empty() || patient.nics.empty()) return;
  const rdma::NicMap& map = patient.map;
  std::size_t mapped = 0;
  for (const rdma::NicMapRow& row : map.rows) {
    mapped += row.nics.empty() ? 0 : 1;
    if (!row.nics.empty() || !row.gpu.cuda_id) continue;
    findings.push_back(
        {"map", Verdict::error, row.text(), "a rank on this GPU cannot use RDMA",
         row.problem.starts_with("DEEP_EP_") ? "correct the mapping, or unset it" : "see the errors of the NICs"});
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
