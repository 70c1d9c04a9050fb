// What NVIDIA's driver tells beside its files: memory, NVLinks. Asked on this machine only, through libnvidia-ml.so.1,
// which is opened at run time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace deep_ep::tools {

struct LiveGpu {
  std::string pci;  ///< "0000:18:00.0", lower case
  std::string name;
  std::uint64_t memory_bytes = 0;
  std::uint64_t free_bytes = 0;
  int capability = 0;  ///< 90 for 9.0
  int links = 0;       ///< NVLinks that are up
  int links_down = 0;  ///< that exist and are not
};

/// Nothing where the library is not there or does not start. In the order of nvidia-smi.
std::optional<std::vector<LiveGpu>> ask_nvml(const char* library = "libnvidia-ml.so.1");

}  // namespace deep_ep::tools
