// A kernel that has been launched and has not ended.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "kernels/primitives/host/launch.hpp"

namespace deep_ep::host_machine {

class HostStream;

class Kernel {
 public:
  Kernel(KernelLaunch kernel_launch, std::shared_ptr<HostStream> of_stream, const void* of_executor,
         std::uint64_t schedule_seed)
      : launch(std::move(kernel_launch)),
        owner(of_executor),
        seed(schedule_seed),
        stream_(std::move(of_stream)),
        blocks_left_(launch.shape.blocks) {}

  /// The stream gets the first failure. All blocks find out and leave.
  void fail(const std::string& text);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// The stream goes on behind the last one, on its worker.
  void block_ended();

  const KernelLaunch launch;
  const void* const owner;  ///< the executor
  const std::uint64_t seed;
  char start_point = 0;  ///< for ThreadSanitizer: the stream releases, threads acquire
  char end_point = 0;    ///< threads release, the stream acquires

 private:
  const std::shared_ptr<HostStream> stream_;
  std::atomic<int> blocks_left_;
  std::atomic<bool> failed_{false};
};

}  // namespace deep_ep::host_machine
