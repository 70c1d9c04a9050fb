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

/// Does a GPU see what NICs write to its memory in the order of writing (GPU_DIRECT_RDMA_WRITES_ORDERING)? SystemError
/// if CUDA does not say. Builds without CUDA: no.
bool gpu_keeps_order_of_writes(int device);

/// Exports memory of the current GPU through CUDA's driver (11.7 or later). The exporter takes any piece of one
/// allocation that begins and ends at host pages, and throws SystemError with the driver's answer. Empty in builds
/// without CUDA.
DmaBufExporter gpu_dma_buf_exporter(int device);

/// How a page of registers comes into a GPU's address space: gives the address at which kernels reach it, as long as
/// that is owned. Throws SystemError: what was refused, and what helps.
using PageMapper = std::function<std::shared_ptr<void>(void* page)>;
/// The CUDA runtime (cudaHostRegister for I/O memory) on one GPU. Refuses everything in builds without CUDA.
PageMapper gpu_page_mapper(int device);

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

}  // namespace deep_ep::rdma::verbs
