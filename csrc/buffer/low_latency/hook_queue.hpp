// Receive parts of low-latency calls that wait for their hooks.
#pragma once

#include <deque>
#include <functional>
#include <memory>

#include "csrc/buffer/one_thread.hpp"

namespace deep_ep {

/// The calls of one kind, whose receive parts run in the order in which they were sent. Used by one thread at a time.
/// Only the buffer keeps it, so that hooks find out when the buffer is gone.
class HookQueue : public std::enable_shared_from_this<HookQueue> {
 public:
  /// Places in the window alternate between two calls, so no more may be under way.
  static constexpr std::size_t kMostWaiting = 2;

  /// @param call for messages. @param one_thread of the buffer: a hook is a call of it.
  HookQueue(const char* call, OneThread& one_thread) : call_(call), one_thread_(one_thread) {}

  /// InvalidArgument if the most parts allowed already wait for their hooks.
  void require_room() const;
  /// Adds a receive part, which `enqueue` enqueues; it holds what the kernel needs until then. Returns its hook, which
  /// does that after those that were sent before it; nothing if that has happened.
  std::function<void()> add(std::function<void()> enqueue);
  /// Enqueues all that wait: before a call that receives at once.
  void receive_all();
  /// Forgets all that wait.
  void drop_all() { waiting_.clear(); }

 private:
  struct Part {
    std::function<void()> enqueue;
  };

  void receive(const std::shared_ptr<Part>& part);
  void receive_first();

  const char* call_;
  OneThread& one_thread_;
  std::deque<std::shared_ptr<Part>> waiting_;
};

}  // namespace deep_ep
