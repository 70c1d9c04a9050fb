// One thread at a time may make calls of a buffer.
#pragma once

#include <atomic>
#include <thread>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

/// Which thread is in a call. Two at once would put the calls of ranks into different orders: an error here names that,
/// where the peers would only see calls that never come.
class OneThread {
 public:
  /// A call of a buffer, from its begin to its end. A call that a call makes is part of it.
  class Use {
   public:
    /// @param call for messages; a literal. @param while_suspended the call may come then. @throws Error where another
    /// thread is in a call, InvalidArgument while the buffer is suspended.
    Use(OneThread& owner, const char* call, bool while_suspended = false) : owner_(owner) {
      if (owner.thread_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
      const char* other = nullptr;
      if (!owner.call_.compare_exchange_strong(other, call, std::memory_order_acquire)) {
        fail<Error>("{}: the buffer is in use by another thread, which is in {}, allowed: one thread at a time", call,
                    other);
      }
      if (owner.suspended_ && !while_suspended) {
        owner.call_.store(nullptr, std::memory_order_release);
        fail<InvalidArgument>("{}: the buffer is suspended, allowed: resume, check and destroy", call);
      }
      owner.thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
      outermost_ = true;
    }
    ~Use() {
      if (!outermost_) return;
      owner_.thread_.store(std::thread::id(), std::memory_order_relaxed);
      owner_.call_.store(nullptr, std::memory_order_release);
    }
    /// Not a call within another one, made by a handler of signals, say.
    bool outermost() const { return outermost_; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    OneThread& owner_;
    bool outermost_ = false;
  };

  /// All later calls are refused, or no longer.
  void suspend(bool suspended) { suspended_ = suspended; }
  bool suspended() const { return suspended_; }

 private:
  bool suspended_ = false;                   ///< of the thread that is in a call
  std::atomic<const char*> call_ = nullptr;  ///< of the thread that is in one; nullptr: none is
  std::atomic<std::thread::id> thread_ = std::thread::id();
};

}  // namespace deep_ep
