// What NVIDIA's driver tells beside its files: memory, NVLinks. Asked on this machine only, through libnvidia-ml.so.1,
// which is opened at run time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace deep_ep::tools {

/// The NVLink domain of several machines that a GPU belongs to, as the fabric manager has registered it.
struct NvLinkFabric {
  enum class State : std::uint8_t { not_supported, not_started, in_progress, completed };
  State state = State::not_supported;
  int error = 0;             ///< of the registration, as NVML numbers them; 0: none
  std::string cluster;       ///< UUID; empty: NVLink ends at this machine
  unsigned clique = 0;       ///< within the cluster: GPUs of one clique reach each other
  std::string text() const;  ///< "8a0b..., clique 3"
};

struct LiveGpu {
  std::string pci;  ///< "0000:18:00.0", lower case
  std::uint64_t memory_bytes = 0;
  int links = 0;                            ///< NVLinks that are up
  std::optional<NvLinkFabric> fabric = {};  ///< nothing where the driver does not say
};

/// Nothing where the library is not there or does not start. In the order of nvidia-smi.
std::optional<std::vector<LiveGpu>> ask_nvml(const char* library = "libnvidia-ml.so.1");

}  // namespace deep_ep::tools
