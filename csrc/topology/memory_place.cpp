#include "csrc/topology/memory_place.hpp"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace deep_ep::topology {

MemoryNear::MemoryNear(int numa_node) noexcept {
  if (numa_node < 0 || numa_node >= kMostNodes) return;
  if (::syscall(SYS_get_mempolicy, &policy_, nodes_.data(), kMostNodes, nullptr, 0UL) != 0) return;
  constexpr std::size_t kBits = 8 * sizeof(unsigned long);
  const auto node = static_cast<std::size_t>(numa_node);
  Nodes wanted{};
  wanted[node / kBits] = 1UL << node % kBits;
  // The kernel counts one bit more than it reads.
  changed_ = ::syscall(SYS_set_mempolicy, MPOL_PREFERRED, wanted.data(), kMostNodes + 1UL) == 0;
}

MemoryNear::~MemoryNear() {
  if (changed_) ::syscall(SYS_set_mempolicy, policy_, nodes_.data(), kMostNodes + 1UL);
}

}  // namespace deep_ep::topology
