#include <cuda_runtime_api.h>

#include <array>

#include "csrc/topology/gpus.hpp"

namespace deep_ep::topology {

std::optional<PciAddress> cuda_device_address(int ordinal) noexcept {
  std::array<char, 32> text{};
  if (cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), ordinal) != cudaSuccess) {
    // The next CUDA call of anybody else must not find this error.
    (void)cudaGetLastError();
    return std::nullopt;
  }
  return parse_pci_address(text.data());
}

}  // namespace deep_ep::topology
