// Memory that an RDMA device may read and write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "csrc/rdma/verbs/device.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::rdma::verbs {

/// Makes a descriptor of the dma-buf that covers exactly the given bytes of GPU memory, or throws saying why it cannot.
/// Empty: the settings have turned that off.
using DmaBufExporter = std::function<UniqueFd(void* address, std::size_t bytes)>;

/// It begins a page, and work requests address it by offsets.
struct MemoryRange {
  void* address = nullptr;
  std::size_t bytes = 0;
  const DmaBufExporter* gpu = nullptr;  ///< of memory of a GPU; null: it is the CPU's
  /// PCIe may bring bytes in any order (relaxed ordering). Nothing is added then: the device refuses signals by this
  /// key.
  bool any_order = false;
};

/// Makes the device take the memory by `call`, which is given the descriptor of a dma-buf, or -1: by the address.
/// False, and errno: refused. A GPU's memory goes as a dma-buf, else as peer memory. SystemError says what was tried
/// and how each attempt failed. Returns how the device reaches the memory: as "host memory" (pinned), "dma-buf" (which
/// the GPU's driver exported), or "peer memory" (by its address, through nvidia-peermem).
const char* register_memory(const Device& device, const MemoryRange& range, const char* name,
                            const std::function<bool(int dma_buf)>& call);

/// Destroying it unregisters the memory, which must still exist. What is written or added by a key of strict ordering
/// is seen after all that was written before it, by whatever key.
struct Registration {
  Registration() = default;
  /// Errors of register_memory().
  Registration(std::shared_ptr<Device> device, const MemoryRange& range);

  std::shared_ptr<ibv_mr> region;  ///< with its keys
  const char* path = "";           ///< see register_memory()
};

}  // namespace deep_ep::rdma::verbs
