// Receive parts of low-latency calls that wait for their hooks.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "csrc/buffer/call_scope.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

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
  void require_room() const {
    if (waiting_.size() < kMostWaiting) return;
    fail<InvalidArgument>(
        "{}: {} calls with return_recv_hook still wait for their hooks, at most {} may; call one first", call_,
        waiting_.size(), kMostWaiting);
  }
  /// Adds a receive part, which `enqueue` enqueues; it holds what the kernel needs until then. Returns its hook, which
  /// does that after those that were sent before it; nothing if that has happened.
  std::function<void()> add(std::function<void()> enqueue) {
    waiting_.push_back(std::make_shared<std::function<void()>>(std::move(enqueue)));
    return [queue = weak_from_this(), part = waiting_.back()] {
      const auto alive = queue.lock();
      if (!alive) throw UseAfterDestroy("the hook of a low-latency call after the buffer's destroy");
      const OneThread::Use use(alive->one_thread_, "a hook of low-latency calls");
      while (*part) alive->receive_first();
    };
  }
  /// Enqueues all that wait: before a call that receives at once.
  void receive_all() {
    while (!waiting_.empty()) receive_first();
  }
  /// Forgets all that wait.
  void drop_all() {
    for (const auto& part : waiting_) *part = nullptr;
    waiting_.clear();
  }

 private:
  void receive_first() {
    (*waiting_.front())();
    *waiting_.front() = nullptr;
    waiting_.pop_front();
  }

  const char* call_;
  OneThread& one_thread_;
  std::deque<std::shared_ptr<std::function<void()>>> waiting_;
};

}  // namespace deep_ep
