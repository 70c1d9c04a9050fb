// Receive parts of low-latency calls that wait for their hooks, and the order of what one kind of call enqueues.
#pragma once

#include <deque>
#include <functional>
#include <memory>

#include "deep_ep/executor.hpp"

namespace deep_ep {

/// Calls of one kind count together, whatever streams they are enqueued on: their kernels must run one after the other,
/// and their receive parts in the order in which they were sent. Used by one thread at a time.
class LowLatencyQueue {
 public:
  /// Places in the window alternate between two calls, so no more may be under way.
  static constexpr std::size_t kMostWaiting = 2;

  /// A receive part. `enqueue` holds what the kernel needs until it is enqueued.
  struct Part {
    StreamHandle stream = nullptr;
    std::function<void()> enqueue;
  };

  LowLatencyQueue(std::shared_ptr<Executor> executor, const char* call) : executor_(std::move(executor)), call_(call) {}

  /// InvalidArgument when as many parts as may be wait for their hooks.
  void require_room() const;
  /// A part that its hook will enqueue.
  std::shared_ptr<Part> wait_for_hook(Part part);
  /// The hook of `part`: enqueues it, after those that were sent before it. Nothing if that has happened.
  void receive(const std::shared_ptr<Part>& part);
  /// Enqueues all that wait: before a call that receives at once.
  void receive_all();
  /// Forgets all that wait.
  void drop_all() { waiting_.clear(); }

  /// Before a kernel of this kind is enqueued on `stream`: it runs after the last one.
  void order(StreamHandle stream);

 private:
  void receive_first();

  std::shared_ptr<Executor> executor_;
  const char* call_;
  std::deque<std::shared_ptr<Part>> waiting_;
  bool used_ = false;
  StreamHandle last_ = nullptr;
};

}  // namespace deep_ep
