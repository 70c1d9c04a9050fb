// Memory of one GPU that other ranks map: what the kinds of CUDA heap have in common.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "csrc/executor/cuda/context.hpp"
#include "csrc/memory/heap_choice.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

class CudaSharedMemory {
 public:
  virtual ~CudaSharedMemory() = default;
  /// One address per rank, this one included; nullptr for a peer that is not mapped (any more).
  virtual const std::vector<std::byte*>& peers() const = 0;
  virtual void unmap_peers() noexcept = 0;
};

/// What the ranks agreed on before memory is made.
struct CudaSharingGroup {
  std::shared_ptr<const cuda::Context> context;
  Bootstrap* bootstrap = nullptr;
  std::span<const HeapCapabilities> ranks;
  HeapPlan plan;
  double timeout_s = 0;

  std::size_t rank() const { return static_cast<std::size_t>(bootstrap->rank()); }
  std::size_t size() const { return ranks.size(); }
  /// Does this rank map that one's memory?
  bool maps(std::size_t peer) const { return shares_memory(plan.kind, ranks[rank()], ranks[peer]); }
};

/// Both are collective, fail on all ranks together, and need the context to be current. The contents are undefined.
std::unique_ptr<CudaSharedMemory> make_vmm_shared_memory(const CudaSharingGroup& group);
std::unique_ptr<CudaSharedMemory> make_ipc_shared_memory(const CudaSharingGroup& group);

}  // namespace deep_ep
