// Receive parts of low-latency calls that wait for their hooks.
#pragma once

#include <deque>
#include <functional>
#include <memory>

namespace deep_ep {

/// The calls of one kind, whose receive parts run in the order in which they were sent. Used by one thread at a time.
class LowLatencyQueue {
 public:
  /// Places in the window alternate between two calls, so no more may be under way.
  static constexpr std::size_t kMostWaiting = 2;

  /// A receive part. `enqueue` holds what the kernel needs until it is enqueued.
  struct Part {
    std::function<void()> enqueue;
  };

  explicit LowLatencyQueue(const char* call) : call_(call) {}

  /// InvalidArgument when as many parts as may be wait for their hooks.
  void require_room() const;
  /// A part that its hook will enqueue.
  std::shared_ptr<Part> wait_for_hook(std::function<void()> enqueue);
  /// The hook of `part`: enqueues it, after those that were sent before it. Nothing if that has happened.
  void receive(const std::shared_ptr<Part>& part);
  /// Enqueues all that wait: before a call that receives at once.
  void receive_all();
  /// Forgets all that wait.
  void drop_all() { waiting_.clear(); }

 private:
  void receive_first();

  const char* call_;
  std::deque<std::shared_ptr<Part>> waiting_;
};

}  // namespace deep_ep
