// The GPUs of this machine as NVIDIA's driver and sysfs show them: no CUDA needed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "csrc/topology/pci.hpp"
#include "csrc/topology/system_root.hpp"

namespace deep_ep::topology {

struct Gpu {
  /// The id that nvidia-smi shows, and CUDA without CUDA_VISIBLE_DEVICES: the position in the order of PCI addresses.
  /// Nothing for a GPU that this container may not use (sysfs still shows it).
  std::optional<int> cuda_id;
  PciLocation pci;
  std::string uuid;   ///< "GPU-...", empty where the driver does not say
  std::string model;  ///< "NVIDIA H200", may be empty

  std::string text() const;  ///< "GPU 3 (0000:18:00.0)"
};

/// All GPUs that NVIDIA's driver runs, in the order of their PCI addresses. GPUs of the machine that a container does
/// not see are listed too, so that containers that share a machine arrive at the same GPU→NIC map.
std::vector<Gpu> find_gpus(const SystemRoot& root);

}  // namespace deep_ep::topology
