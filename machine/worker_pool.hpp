// The CPU threads that run kernels. One pool for the process: ranks that are threads share it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/support/backoff.hpp"
#include "machine/block.hpp"

namespace deep_ep::host_machine {

/// One CPU thread. Runs its blocks in turn, a slice each; when all of them only poll, it lets other threads of the
/// machine go first, then sleeps for moments.
class Worker {
 public:
  Worker();

  /// Runs `task` soon, between two slices.
  void post(std::function<void()> task);
  /// Takes a block for its whole life.
  void start(std::shared_ptr<Kernel> kernel, int block);
  /// An executor is gone.
  void forget(std::uint64_t owner);

 private:
  [[noreturn]] void loop();
  void take_tasks(int idle_rounds);
  bool run_blocks();
  /// Lets other threads of the machine go first.
  void yield();
  bool yields_are_dear() const;
  std::chrono::nanoseconds nap() const;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::function<void()>> inbox_;
  std::atomic<bool> has_mail_{false};

  // Only the worker's own thread touches these.
  Context context_;
  FiberPool fibers_;
  Backoff backoff_;                  ///< since all blocks merely poll
  std::chrono::nanoseconds woke_{};  ///< from the last nap, in the thread's own processor time
  Backoff::Clock::time_point yield_again_;
  struct Resident {
    std::shared_ptr<Kernel> kernel;
    std::unique_ptr<Block> block;
  };
  std::vector<Resident> residents_;
};

class WorkerPool {
 public:
  /// The process's pool, made at first use: DEEP_EP_HOST_THREADS workers.
  static WorkerPool& instance();

  explicit WorkerPool(int workers);
  int size() const { return static_cast<int>(workers_.size()); }
  void post(std::function<void()> task) { next().post(std::move(task)); }
  /// Distributes the blocks of a kernel over the workers.
  void start(const std::shared_ptr<Kernel>& kernel);
  /// A number for an executor, and its end.
  std::uint64_t new_owner() { return owners_.fetch_add(1) + 1; }
  void forget(std::uint64_t owner);

 private:
  Worker& next() { return *workers_[turn_.fetch_add(1, std::memory_order_relaxed) % workers_.size()]; }

  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<unsigned> turn_{0};
  std::atomic<std::uint64_t> owners_{0};
};

}  // namespace deep_ep::host_machine
