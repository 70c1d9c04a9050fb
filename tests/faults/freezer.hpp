// Stops a rank in the middle of a kernel, on the CPU executor, without a trace of it in the executor or the kernels: a
// thread of a kernel reaches its machine through a pointer, and every flag, barrier and copy goes that way. A machine
// in between counts these events; at the chosen one the whole rank stands still, as if its GPU had stopped.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include "kernels/primitives/host/launch.hpp"
#include "kernels/primitives/host/machine.hpp"

namespace deep_ep::faults {

/// One for each rank. Kernels that are launched while it is armed count.
class Freezer {
 public:
  using Clock = std::chrono::steady_clock;

  /// The rank stops at its `event`-th event from now on, for `hold_s` seconds, or, where that is 0, until release().
  /// `then` is called at that moment (a process that ends itself, say).
  void arm(int event, double hold_s, std::function<void()> then = {}) {
    hold_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(hold_s));
    then_ = std::move(then);
    left_.store(event);
    armed_.store(true);
  }
  bool armed() const { return armed_.load(std::memory_order_relaxed); }
  void disarm() { armed_.store(false); }
  void release() { released_.store(true); }
  bool reached() const { return reached_.load(); }
  Clock::time_point when() const { return when_; }  ///< once reached()

  /// By a thread of a kernel.
  void event(host_machine::Machine& machine) {
    if (!armed()) return;
    if (left_.fetch_sub(1) == 1) {
      when_ = Clock::now();
      reached_.store(true);
      if (then_) then_();
    }
    while (left_.load(std::memory_order_relaxed) <= 0 && armed() && !released_.load(std::memory_order_relaxed)) {
      if (reached() && hold_ != Clock::duration::zero() && Clock::now() - when_ > hold_) disarm();
      machine.pause(1);
    }
  }

 private:
  std::atomic<bool> armed_ = false, released_ = false, reached_ = false;
  std::atomic<int> left_ = 0;
  Clock::duration hold_{};
  Clock::time_point when_;
  std::function<void()> then_;
};

/// The launch with the freezer's eye on each of its threads.
host_machine::KernelLaunch watched(host_machine::KernelLaunch launch, std::shared_ptr<Freezer> freezer);

}  // namespace deep_ep::faults
