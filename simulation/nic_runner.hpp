// Keeps the kernel that plays a NIC running.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "csrc/executor/backend.hpp"
#include "csrc/executor/own_stream.hpp"
#include "simulation/kernels/simulated_nic.hpp"

namespace deep_ep::rdma {

/// A kernel that stayed for ever would stop everybody who waits for the device (cudaDeviceSynchronize, cudaFree, a
/// kernel that is loaded for the first time). So each launch ends after a short time without work, and after a longer
/// one in any case, and a thread sees to it that several launches are always enqueued behind the one that runs. A
/// process that dies leaves no more than those.
class NicRunner {
 public:
  /// `params.stop` and `params.serving` are this object's business, and so is how long a launch lasts. All kernels of
  /// the library are loaded before. Returns when the NIC serves; SystemError if that takes longer than 60 s.
  NicRunner(std::shared_ptr<Backend> executor, const SimulatedNicParams& params, const LaunchShape& shape);
  /// What was taken is finished; nothing touches memory afterwards.
  ~NicRunner() { end(); }
  NicRunner(const NicRunner&) = delete;
  NicRunner& operator=(const NicRunner&) = delete;

  /// Why the NIC is gone; empty while it serves.
  std::string failure() const;

 private:
  /// In host memory, written by one side each.
  struct Words {
    std::uint64_t stop;
    alignas(64) std::uint64_t serving;
  };

  void keep_running(const std::stop_token& stop);
  void wait_until_serving() const;
  void end() noexcept;

  std::shared_ptr<Backend> executor_;
  std::shared_ptr<Words> words_;
  SimulatedNicParams params_;
  LaunchShape shape_;
  OwnStream stream_;
  std::deque<EventHandle> ends_;  ///< of launches that are enqueued
  mutable std::mutex mutex_;
  std::string failure_;
  std::jthread thread_;  ///< last: uses the rest
};

}  // namespace deep_ep::rdma
