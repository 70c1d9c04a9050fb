// Memory of queue pairs that kernels drive by themselves: rings, completion entries, doorbell records, and the indices.
#pragma once

#include <cstddef>
#include <memory>

#include "csrc/executor/own_stream.hpp"
#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma::verbs {

/// Each queue pair has `layout.bytes` of its own, aligned to a GPU's page and filled in as the first kernel needs it.
class GpuRingMemory {
 public:
  /// `on_gpu`: the executor's device memory, otherwise its pinned memory.
  GpuRingMemory(std::shared_ptr<Executor> executor, const devx::QueuePairLayout& layout, std::size_t count,
                bool on_gpu);
  ~GpuRingMemory();
  GpuRingMemory(const GpuRingMemory&) = delete;
  GpuRingMemory& operator=(const GpuRingMemory&) = delete;

  bool on_gpu() const { return on_gpu_; }
  /// Where the layout's offsets count from.
  std::byte* ring(std::size_t i) const { return rings_ + i * layout_.bytes; }
  RdmaQueueState* state(std::size_t i) const { return states_ + i; }

  /// Is everything complete that kernels have posted, or failed? No kernel may be posting.
  bool idle() const;

 private:
  void fill();
  void free() noexcept;

  std::shared_ptr<Executor> executor_;
  OwnStream stream_;  ///< for transfers
  devx::QueuePairLayout layout_;
  std::size_t count_;
  bool on_gpu_;
  void* allocation_ = nullptr;
  std::byte* rings_ = nullptr;
  RdmaQueueState* states_ = nullptr;
};

}  // namespace deep_ep::rdma::verbs
