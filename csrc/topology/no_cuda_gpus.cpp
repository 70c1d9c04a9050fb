// Stands in for cuda_gpus.cpp in builds without CUDA.
#include "csrc/topology/gpus.hpp"

namespace deep_ep::topology {

std::optional<PciAddress> cuda_device_address(int) noexcept { return std::nullopt; }

}  // namespace deep_ep::topology
