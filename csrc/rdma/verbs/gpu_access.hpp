// What CUDA does for NICs: GPU memory as a dma-buf, which lets a NIC reach it without nvidia-peermem, and doorbell
// pages in a GPU's address space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "csrc/rdma/verbs/registration.hpp"

namespace deep_ep::rdma::verbs {

/// How a page of registers comes into a GPU's address space: gives the address at which kernels reach it, as long as
/// that is owned. Throws SystemError: what was refused, and what helps. Only a trial gives a reliable answer: what is
/// permitted depends on both driver options and privileges.
using PageMapper = std::function<std::shared_ptr<void>(void* page)>;

struct GpuAccess {
  /// Does the GPU see what NICs write to its memory in the order of writing (GPU_DIRECT_RDMA_WRITES_ORDERING)?
  bool keeps_order_of_writes = true;
  /// By CUDA's driver (11.7 or later), which takes any piece of one allocation that begins and ends at host pages.
  DmaBufExporter export_dma_buf = {};
  PageMapper map_page = {};  ///< by the CUDA runtime (cudaHostRegister for I/O memory), for the handler `gpu`
  std::size_t page_bytes = host_page_bytes();  ///< of this machine, and of all memory of queues
};
/// Of the current GPU. SystemError if CUDA does not say how it orders writes. Nothing in builds without CUDA.
GpuAccess gpu_access(int device);

}  // namespace deep_ep::rdma::verbs
