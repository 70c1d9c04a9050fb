// The memory of a queue pair that the `cpu` handler serves: ring, completion entry and producer index in pinned host
// memory, the owner's indices in the device's.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/rdma/params.hpp"

namespace deep_ep {
class Executor;
}

namespace deep_ep::rdma {

struct RingOptions {
  std::uint32_t number = 0;       ///< of the queue pair: 1 to 2^24 - 1, as the handler and the wire know it
  std::uint32_t depth = 1024;     ///< entries; a power of two from 64 to 32768
  std::uint32_t batch = 32;       ///< entries after which a kernel rings unasked, 1 to depth / 2
  int peer = -1;                  ///< rank at the other end
  std::uint64_t first_index = 0;  ///< number of the first entry (tests of wrap-around)
};

/// InvalidArgument unless rings may have this depth and their doorbell this batch.
void check_ring(std::uint32_t depth, std::uint32_t batch);

class RingMemory {
 public:
  /// InvalidArgument: an option outside its limits.
  RingMemory(std::shared_ptr<Executor> executor, const RingOptions& options);
  ~RingMemory();
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;

  /// What kernels need; `sink` is the caller's to fill in.
  RdmaQueuePair queue_pair() const;

  const RingOptions& options() const { return options_; }
  device::rdma::WorkQueueEntry* ring() const { return layout_->ring(); }
  device::rdma::CompletionEntry* completion() const { return &layout_->completion; }
  std::uint64_t* producer_index() const { return &layout_->producer_index; }

 private:
  /// The pinned allocation. What the kernel writes and what the handler writes are in lines of their own.
  struct Layout {
    device::rdma::CompletionEntry completion;
    alignas(64) std::uint64_t producer_index;
    alignas(64) device::rdma::WorkQueueEntry first;

    device::rdma::WorkQueueEntry* ring() { return &first; }
  };

  std::shared_ptr<Executor> executor_;
  RingOptions options_;
  Layout* layout_ = nullptr;
  RdmaQueueState* state_ = nullptr;
};

}  // namespace deep_ep::rdma
