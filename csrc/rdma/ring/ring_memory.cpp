#include "csrc/rdma/ring/ring_memory.hpp"

#include <bit>
#include <cstring>

#include "csrc/executor/own_stream.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma {

void check_ring(std::uint32_t depth, std::uint32_t batch) {
  if (!std::has_single_bit(depth) || depth < 64 || depth > device::rdma::kMaxDepth) {
    fail<InvalidArgument>("queue pair depth {}, allowed: a power of two from 64 to {}", depth, device::rdma::kMaxDepth);
  }
  if (batch < 1 || batch > depth / 2) {
    fail<InvalidArgument>("doorbell batch {}, allowed: 1 to {} (half the depth)", batch, depth / 2);
  }
}

RingMemory::RingMemory(std::shared_ptr<Executor> executor, const RingOptions& options)
    : executor_(std::move(executor)), options_(options) {
  if (options.number == 0 || options.number >= 1u << 24) {
    fail<InvalidArgument>("queue pair number {}, allowed: 1 to 2^24 - 1", options.number);
  }
  check_ring(options.depth, options.batch);
  const std::size_t bytes = sizeof(Layout) + (options.depth - 1) * sizeof(device::rdma::WorkQueueEntry);
  layout_ = static_cast<Layout*>(executor_->allocate_pinned(bytes));
  // All ones: entries with no known opcode, and a completion that is not yet written.
  std::memset(static_cast<void*>(layout_), 0xff, bytes);
  layout_->producer_index = options.first_index;
  try {
    state_ = static_cast<RdmaQueueState*>(executor_->allocate(sizeof(RdmaQueueState)));
    const OwnStream stream(*executor_);
    const RdmaQueueState state{options.first_index, options.first_index, 0};
    executor_->copy(state_, &state, sizeof state, stream.get());
    executor_->synchronize(stream.get());
  } catch (...) {
    executor_->free(state_);
    executor_->free_pinned(layout_);
    throw;
  }
}

RingMemory::~RingMemory() {
  executor_->free(state_);
  executor_->free_pinned(layout_);
}

RdmaQueuePair RingMemory::queue_pair() const {
  RdmaQueuePair pair;
  pair.ring = layout_->ring();
  pair.completion = &layout_->completion;
  pair.doorbell = &layout_->producer_index;
  pair.state = state_;
  pair.kind = RdmaDoorbell::producer_index;
  pair.number = options_.number;
  pair.depth = options_.depth;
  pair.batch = options_.batch;
  pair.peer = options_.peer;
  return pair;
}

}  // namespace deep_ep::rdma
