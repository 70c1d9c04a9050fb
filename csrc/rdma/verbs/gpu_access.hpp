// What CUDA does for NICs: GPU memory as a dma-buf, which lets a NIC reach it without nvidia-peermem, and doorbell
// pages in a GPU's address space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "csrc/rdma/verbs/registration.hpp"

namespace deep_ep::rdma::verbs {

/// How a page of registers comes into a GPU's address space: gives the address at which kernels reach it, as long as
/// that is owned. Throws SystemError: what was refused, and what helps.
using PageMapper = std::function<std::shared_ptr<void>(void* page)>;

/// Pages of an mlx5 device's doorbell registers (UAR), in a GPU's address space so that kernels can ring them. Several
/// queue pairs have registers on one page, which may be mapped once only.
struct DoorbellPages {
  /// A register (8 bytes, aligned) as kernels address it, as long as that is owned; `reg` is how the host does. Errors
  /// of the mapper. Only a trial gives a reliable answer: what is permitted depends on both driver options and
  /// privileges.
  std::shared_ptr<std::uint64_t> map(void* reg) {
    const std::size_t place = reinterpret_cast<std::uintptr_t>(reg) % page_bytes;
    std::byte* const page = static_cast<std::byte*>(reg) - place;
    std::shared_ptr<void> at = mapped[page].lock();
    if (at == nullptr) mapped[page] = at = mapper(page);
    return {at, reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(at.get()) + place)};
  }

  PageMapper mapper;
  std::size_t page_bytes = host_page_bytes();  ///< of this machine: a page may have registers of many queue pairs
  std::map<std::byte*, std::weak_ptr<void>> mapped = {};  ///< from the host's address to that of kernels
};

struct GpuAccess {
  /// Does the GPU see what NICs write to its memory in the order of writing (GPU_DIRECT_RDMA_WRITES_ORDERING)?
  bool keeps_order_of_writes = true;
  /// By CUDA's driver (11.7 or later), which takes any piece of one allocation that begins and ends at host pages.
  DmaBufExporter export_dma_buf;
  /// By the CUDA runtime (cudaHostRegister for I/O memory). For the handler `gpu`; the size of their pages is that of
  /// all memory of queues.
  std::shared_ptr<DoorbellPages> doorbells;
};
/// Of the current GPU. SystemError if CUDA does not say how it orders writes. Nothing in builds without CUDA.
GpuAccess gpu_access(int device);

}  // namespace deep_ep::rdma::verbs
