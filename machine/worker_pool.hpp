// The CPU threads that run kernels. One pool for the process: ranks that are threads share it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/support/home_process.hpp"
#include "machine/kernel.hpp"

namespace deep_ep::host_machine {

class Worker;

class WorkerPool {
 public:
  /// The process's pool, made at first use: DEEP_EP_HOST_THREADS workers.
  static WorkerPool& instance();

  /// Runs `task` soon.
  void post(std::function<void()> task);
  /// Distributes the blocks of a kernel over the workers.
  void start(const std::shared_ptr<Kernel>& kernel);
  /// An executor is gone.
  void forget(const void* owner);

 private:
  WorkerPool();
  Worker& next();

  const HomeProcess home_;
  std::vector<std::shared_ptr<Worker>> workers_;
  std::atomic<unsigned> turn_{0};
};

}  // namespace deep_ep::host_machine
