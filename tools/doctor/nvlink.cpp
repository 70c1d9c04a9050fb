// `deep_ep doctor`: NVLinks, where the driver was asked.
#include <fmt/format.h>

#include <algorithm>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

void check_nvlink(const Patient& patient, Findings& findings) {
  if (!patient.live_gpus || patient.live_gpus->empty()) return;
  const std::vector<LiveGpu>& gpus = *patient.live_gpus;
  int most = 0;
  for (const LiveGpu& gpu : gpus) most = std::max(most, gpu.links);
  if (most == 0) {
    if (gpus.size() > 1) {
      findings.push_back(
          {"nvlink", Verdict::warning, "no GPU has an NVLink that is up",
           "GPUs of this machine reach each other by PCIe, if at all",
           "nvidia-smi nvlink -s; on machines with NVSwitches, start nvidia-fabricmanager of the driver's "
           "release"});
    }
    return;
  }
  std::string fewer;
  for (const LiveGpu& gpu : gpus) {
    if (gpu.links == most) continue;
    fewer += fmt::format("{}{} has {}", fewer.empty() ? "" : ", ", gpu.pci, gpu.links);
  }
  findings.push_back({"nvlink", fewer.empty() ? Verdict::ok : Verdict::error,
                      fewer.empty() ? fmt::format("{} NVLinks of each GPU are up", most)
                                    : fmt::format("{} NVLinks of a GPU are up, but {}", most, fewer),
                      fewer.empty() ? "" : "ranks of these GPUs are slower, or cannot reach the others",
                      fewer.empty() ? "" : "dmesg (Xid 74); reset the GPU, then the fabric manager; drain the node"});
}

}  // namespace deep_ep::tools
