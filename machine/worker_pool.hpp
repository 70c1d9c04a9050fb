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
  /// An executor is gone.
  void forget(const void* owner);

 private:
  Worker& next();

  std::vector<std::shared_ptr<Worker>> workers_;
  std::atomic<unsigned> turn_{0};
};

}  // namespace deep_ep::host_machine
