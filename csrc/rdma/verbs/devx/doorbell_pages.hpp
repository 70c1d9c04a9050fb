// Pages of an mlx5 device's doorbell registers (UAR), mapped into a GPU so that kernels can ring them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "csrc/rdma/verbs/device.hpp"

namespace deep_ep::rdma::verbs {

/// How a page of registers comes into a GPU's address space, and how it leaves.
struct PageMapper {
  /// The address at which kernels reach the page, as long as it is owned. Throws SystemError: what was refused, and
  /// what helps.
  std::function<std::shared_ptr<void>(void* page)> map;
  std::size_t page_bytes = host_page_bytes();  ///< of this machine: a page may have registers of many queue pairs
};

/// Several queue pairs have registers on one page, which may be mapped once only.
class DoorbellPages {
 public:
  explicit DoorbellPages(PageMapper mapper) : mapper_(std::move(mapper)) {}

  /// A register (8 bytes, aligned) as kernels address it; `reg` is how the host does. SystemError: kernels cannot ring
  /// it, and why. Only a trial gives a reliable answer: what is permitted depends on both driver options and
  /// privileges.
  std::uint64_t* map(void* reg);
  void unmap() { pages_.clear(); }

 private:
  PageMapper mapper_;
  std::map<std::byte*, std::shared_ptr<void>> pages_;  ///< from the host's address to that of kernels
};

}  // namespace deep_ep::rdma::verbs
