// Where memory comes from that the calling thread allocates.
#pragma once

#include <array>

namespace deep_ep::topology {

/// While it lives, the calling thread's new memory comes from a NUMA node where that has some left, and else from
/// anywhere; afterwards as before. Only memory that is used, or pinned, in that time. Nothing happens for a node below
/// 0 (not known), nor where the system does not allow it, as in some containers.
class MemoryNear {
 public:
  explicit MemoryNear(int numa_node) noexcept;
  ~MemoryNear();
  MemoryNear(const MemoryNear&) = delete;
  MemoryNear& operator=(const MemoryNear&) = delete;

 private:
  static constexpr int kMostNodes = 1024;  // that Linux may be built for
  using Nodes = std::array<unsigned long, kMostNodes / (8 * sizeof(unsigned long))>;

  bool changed_ = false;
  int policy_ = 0;  ///< of the thread, before
  Nodes nodes_{};
};

}  // namespace deep_ep::topology
