#include "csrc/executor/cuda/event_pool.hpp"

#include "csrc/executor/cuda/context.hpp"

namespace deep_ep::cuda {

EventPool::~EventPool() {
  quietly([&] {
    const CurrentContext current(*context_);
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  });
}

EventHandle EventPool::record(cudaStream_t stream) {
  cudaEvent_t event = take();
  // Waits that are already enqueued keep their moment, so an event may be recorded again at any time.
  EventHandle handle(
      event, [pool = shared_from_this()](void* returned) { pool->give_back(static_cast<cudaEvent_t>(returned)); });
  check(cudaEventRecord(event, stream), context_->device(), "cudaEventRecord");
  return handle;
}

cudaEvent_t EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  const RelaxedCapture relaxed;
  check(cudaEventCreateWithFlags(&event, timed_ ? cudaEventDefault : cudaEventDisableTiming), context_->device(),
        "cudaEventCreateWithFlags");
  return event;
}

void EventPool::give_back(cudaEvent_t event) noexcept {
  quietly([&] {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
  });
}

}  // namespace deep_ep::cuda
