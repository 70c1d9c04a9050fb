// The CPU threads that run kernels. One pool for the process: ranks that are threads share it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "machine/kernel.hpp"

namespace deep_ep::host_machine {

class Worker;

class WorkerPool {
 public:
  /// The process's pool, made at first use: DEEP_EP_HOST_THREADS workers.
  static WorkerPool& instance();

  explicit WorkerPool(int workers);
  /// Runs `task` soon.
  void post(std::function<void()> task);
  /// Distributes the blocks of a kernel over the workers.
  void start(const std::shared_ptr<Kernel>& kernel);
  /// A number for an executor, and its end.
  std::uint64_t new_owner() { return owners_.fetch_add(1) + 1; }
  void forget(std::uint64_t owner);

 private:
  Worker& next();

  std::vector<std::shared_ptr<Worker>> workers_;
  std::atomic<unsigned> turn_{0};
  std::atomic<std::uint64_t> owners_{0};
};

}  // namespace deep_ep::host_machine
