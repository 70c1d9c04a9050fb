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

/// Several queue pairs have registers on one page, which may be mapped once only.
class DoorbellPages {
 public:
  explicit DoorbellPages(PageMapper mapper) : mapper_(std::move(mapper)) {}
  ~DoorbellPages() { unmap(); }
  DoorbellPages(const DoorbellPages&) = delete;
  DoorbellPages& operator=(const DoorbellPages&) = delete;

  /// A register (8 bytes, aligned) as kernels address it; `reg` is how the host does. SystemError: kernels cannot ring
  /// it, and why. Only a trial gives a reliable answer: what is permitted depends on both driver options and
  /// privileges.
  std::uint64_t* map(void* reg);
  void unmap();

 private:
  PageMapper mapper_;
  std::map<std::byte*, std::byte*> pages_;  ///< from the host's address to that of kernels
};

}  // namespace deep_ep::rdma::verbs
