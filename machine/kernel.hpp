// A kernel that has been launched and has not ended.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

#include "kernels/primitives/host/machine.hpp"

namespace deep_ep::host_machine {

class Kernel {
 public:
  /// `ended` is called on the worker of the block that ends last.
  Kernel(KernelLaunch kernel_launch, const void* of_executor, std::uint64_t schedule_seed,
         std::function<void(Kernel&)> ended)
      : launch(std::move(kernel_launch)),
        owner(of_executor),
        seed(schedule_seed),
        ended_(std::move(ended)),
        blocks_left_(launch.shape.blocks) {}

  /// Notes the first failure. All blocks find out and leave.
  void fail(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return;
    error_ = "kernel " + std::string(launch.name) + ", " + text;
    failed_.store(true, std::memory_order_release);
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// Empty unless it failed; for use after the end.
  const std::string& error() const { return error_; }

  void block_ended() {
    if (blocks_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) ended_(*this);
  }

  const KernelLaunch launch;
  const void* const owner;  ///< the executor
  const std::uint64_t seed;
  char start_point = 0;  ///< for ThreadSanitizer: the stream releases, threads acquire
  char end_point = 0;    ///< threads release, the stream acquires

 private:
  std::function<void(Kernel&)> ended_;
  std::atomic<int> blocks_left_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::string error_;
};

}  // namespace deep_ep::host_machine
