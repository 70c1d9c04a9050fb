// Memory that an RDMA device may read and write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep::rdma::verbs {

/// Bytes of a page of this machine: 4 KiB, or 64 KiB on some machines with Arm processors.
std::size_t host_page_bytes();

/// Makes a descriptor of the dma-buf that covers exactly the given bytes of GPU memory, or throws saying why it cannot.
/// Empty: the settings have turned that off.
using DmaBufExporter = std::function<UniqueFd(void* address, std::size_t bytes)>;

/// It begins a page, and work requests address it by offsets.
struct MemoryRange {
  void* address = nullptr;
  std::size_t bytes = 0;
  const DmaBufExporter* gpu = nullptr;  ///< of memory of a GPU; null: it is the CPU's
};

/// Makes the device take the memory by `call`, which is given the descriptor of a dma-buf, or -1: by the address.
/// False, and errno: refused. A GPU's memory goes as a dma-buf, else as peer memory. SystemError says what was tried
/// and how each attempt failed. Returns how the device reaches the memory: as "host memory" (pinned), "dma-buf" (which
/// the GPU's driver exported), or "peer memory" (by its address, through nvidia-peermem).
const char* register_memory(const std::string& device, const MemoryRange& range, const char* name,
                            const std::function<bool(int dma_buf)>& call);

}  // namespace deep_ep::rdma::verbs
