// Events for reuse: creating one costs several microseconds, recording one less than one.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "csrc/executor/cuda/context.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::cuda {

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  EventPool(std::shared_ptr<const Context> context, bool timed) : context_(std::move(context)), timed_(timed) {}
  ~EventPool();

  /// Records an event on the stream. It returns to the pool, which it keeps alive, when the last handle goes.
  /// The context must be current.
  EventHandle record(cudaStream_t stream);

 private:
  cudaEvent_t take();
  void give_back(cudaEvent_t event) noexcept;

  std::shared_ptr<const Context> context_;
  bool timed_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

inline cudaEvent_t native(const EventHandle& event) { return static_cast<cudaEvent_t>(event.get()); }

}  // namespace deep_ep::cuda
