// Pages of an mlx5 device's doorbell registers (UAR), mapped into a GPU so that kernels can ring them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "csrc/rdma/verbs/device.hpp"

namespace deep_ep::rdma::verbs {

/// How a page of registers comes into a GPU's address space, and how it leaves.
struct PageMapper {
  /// The address at which kernels reach the page. Throws SystemError: what was refused, and what helps.
  std::function<void*(void* page)> map;
  std::function<void(void* page)> unmap;
  std::size_t page_bytes = host_page_bytes();  ///< of this machine: a page may have registers of many queue pairs
};

/// The CUDA runtime (cudaHostRegister for I/O memory) on one GPU. Refuses everything in builds without CUDA.
PageMapper gpu_page_mapper(int device);

class MappedDoorbell;

/// Several queue pairs have registers on one page, which may be mapped once only: counts its users.
class DoorbellPages {
 public:
  explicit DoorbellPages(PageMapper mapper) : mapper_(std::move(mapper)) {}
  DoorbellPages(const DoorbellPages&) = delete;
  DoorbellPages& operator=(const DoorbellPages&) = delete;

  /// A register (8 bytes, aligned) as kernels address it; `reg` is how the host does. SystemError: kernels cannot ring
  /// it, and why. Only a trial gives a reliable answer: what is permitted depends on both driver options and
  /// privileges.
  MappedDoorbell map(void* reg);

 private:
  friend MappedDoorbell;
  void unmap(void* reg);
  std::size_t place_in_page(const void* reg) const {
    return reinterpret_cast<std::uintptr_t>(reg) % mapper_.page_bytes;
  }
  std::byte* page_of(void* reg) const { return static_cast<std::byte*>(reg) - place_in_page(reg); }

  struct Page {
    std::byte* device = nullptr;
    int users = 0;
  };

  PageMapper mapper_;
  std::map<std::byte*, Page> pages_;  ///< by the host's address
};

/// A register that kernels ring, mapped as long as this lives. It ends before its pages do.
class MappedDoorbell {
 public:
  MappedDoorbell(DoorbellPages& pages, void* reg, std::uint64_t* mapped)
      : pages_(&pages), register_(reg), mapped_(mapped) {}
  MappedDoorbell(MappedDoorbell&& other) noexcept
      : pages_(std::exchange(other.pages_, nullptr)), register_(other.register_), mapped_(other.mapped_) {}
  MappedDoorbell& operator=(MappedDoorbell&&) = delete;
  ~MappedDoorbell() {
    if (pages_ != nullptr) pages_->unmap(register_);
  }

  std::uint64_t* get() const { return mapped_; }

 private:
  DoorbellPages* pages_;
  void* register_;
  std::uint64_t* mapped_;
};

}  // namespace deep_ep::rdma::verbs
