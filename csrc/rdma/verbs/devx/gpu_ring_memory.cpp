#include "csrc/rdma/verbs/devx/gpu_ring_memory.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace deep_ep::rdma::verbs {
namespace {

constexpr std::size_t kGpuPage = 65536;

}  // namespace

GpuRingMemory::GpuRingMemory(std::shared_ptr<Executor> executor, const devx::QueuePairLayout& layout, std::size_t count,
                             bool on_gpu)
    : executor_(std::move(executor)),
      stream_(*executor_),
      layout_(layout),
      count_(std::max<std::size_t>(1, count)),
      on_gpu_(on_gpu) {
  const std::size_t bytes = count_ * layout_.bytes + kGpuPage;
  allocation_ = on_gpu_ ? executor_->allocate(bytes) : executor_->allocate_pinned(bytes);
  const auto address = reinterpret_cast<std::uintptr_t>(allocation_);
  rings_ = static_cast<std::byte*>(allocation_) + (kGpuPage - address % kGpuPage) % kGpuPage;
  try {
    states_ = static_cast<RdmaQueueState*>(executor_->allocate(count_ * sizeof(RdmaQueueState)));
    fill();
  } catch (...) {
    free();
    throw;
  }
}

GpuRingMemory::~GpuRingMemory() { free(); }

void GpuRingMemory::free() noexcept {
  executor_->free(states_);
  on_gpu_ ? executor_->free(allocation_) : executor_->free_pinned(allocation_);
}

void GpuRingMemory::fill() {
  // All ones: a completion that is not yet written. Nothing is posted: records and indices are 0.
  executor_->fill(rings_, 0xff, count_ * layout_.bytes, stream_.get());
  for (std::size_t i = 0; i < count_; ++i) {
    executor_->fill(ring(i) + layout_.doorbell_record, 0, layout_.bytes - layout_.doorbell_record, stream_.get());
  }
  executor_->fill(states_, 0, count_ * sizeof(RdmaQueueState), stream_.get());
  executor_->synchronize(stream_.get());
}

bool GpuRingMemory::idle() const {
  std::vector<RdmaQueueState> states(count_);
  std::vector<device::rdma::CompletionEntry> completions(count_);
  executor_->copy(states.data(), states_, count_ * sizeof(RdmaQueueState), stream_.get());
  for (std::size_t i = 0; i < count_; ++i) {
    executor_->copy(&completions[i], ring(i) + layout_.completion, sizeof completions[i], stream_.get());
  }
  executor_->synchronize(stream_.get());
  for (std::size_t i = 0; i < count_; ++i) {
    if (states[i].posted == states[i].completed || states[i].failure != 0) continue;
    const std::uint32_t tail = completions[i].tail;
    const std::uint32_t opcode = device::rdma::tail_opcode(tail);
    // The device tells the lowest 16 bits of the entry that completed last, and the last that was posted asks for it.
    const auto last = static_cast<std::uint32_t>(states[i].posted - 1) & 0xffffu;
    if (opcode == device::rdma::kCompletionNotYetWritten) return false;
    if (opcode == device::rdma::kCompletionOk && device::rdma::tail_counter(tail) != last) return false;
  }
  return true;
}

}  // namespace deep_ep::rdma::verbs
