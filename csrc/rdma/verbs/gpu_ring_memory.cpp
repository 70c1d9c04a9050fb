#include "csrc/rdma/verbs/gpu_ring_memory.hpp"

#include <algorithm>
#include <utility>

#include "deep_ep/executor.hpp"

namespace deep_ep::rdma::verbs {
namespace {

constexpr std::size_t kGpuPage = 65536;

}  // namespace

GpuRingMemory::GpuRingMemory(std::shared_ptr<Executor> executor, const devx::QueuePairLayout& layout, std::size_t count,
                             bool on_gpu)
    : executor_(std::move(executor)), layout_(layout), on_gpu_(on_gpu) {
  count = std::max<std::size_t>(1, count);
  const std::size_t bytes = count * layout_.bytes + kGpuPage;
  allocation_ = on_gpu_ ? executor_->allocate(bytes) : executor_->allocate_pinned(bytes);
  const auto address = reinterpret_cast<std::uintptr_t>(allocation_);
  rings_ = static_cast<std::byte*>(allocation_) + (kGpuPage - address % kGpuPage) % kGpuPage;
  try {
    states_ = static_cast<RdmaQueueState*>(executor_->allocate(count * sizeof(RdmaQueueState)));
    fill(count);
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

void GpuRingMemory::fill(std::size_t count) {
  const StreamHandle stream = executor_->create_stream();
  try {
    // All ones: a completion that is not yet written. Nothing is posted: records and indices are 0.
    executor_->fill(rings_, 0xff, count * layout_.bytes, stream);
    for (std::size_t i = 0; i < count; ++i) {
      executor_->fill(ring(i) + layout_.doorbell_record, 0, layout_.bytes - layout_.doorbell_record, stream);
    }
    executor_->fill(states_, 0, count * sizeof(RdmaQueueState), stream);
    executor_->synchronize(stream);
  } catch (...) {
    executor_->destroy_stream(stream);
    throw;
  }
  executor_->destroy_stream(stream);
}

}  // namespace deep_ep::rdma::verbs
