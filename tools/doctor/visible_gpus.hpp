// Which GPUs CUDA shows to a process.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "csrc/topology/gpus.hpp"

namespace deep_ep::topology {

/// Positions in `gpus` of CUDA devices 0, 1, ... under this value of CUDA_VISIBLE_DEVICES: integers, UUIDs ("GPU-...",
/// unambiguous beginnings are enough). Not set: all. As in CUDA, an unknown entry ends the list (`stopped_at` says
/// which) and so does "-1"; if an entry is given twice, there is no device at all.
struct VisibleGpus {
  std::vector<std::size_t> gpus;
  std::string stopped_at;  ///< the entry that CUDA does not accept, with the reason; empty when all is well
};
VisibleGpus visible_gpus(const std::vector<Gpu>& gpus, const std::optional<std::string>& cuda_visible_devices);

}  // namespace deep_ep::topology
