// The handler `doorbell`: kernels fill rings in their GPU's memory, and publish how far in host memory, as for the
// handler `cpu`. A thread rings the device for them. Neither the GPU nor this process needs any privilege for that.
#pragma once

#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/polling.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma {

/// The thread writes the doorbell records too. A kernel's would be ahead of doorbells that the thread has yet to ring:
/// a device that reads it to recover a lost doorbell would then be rung for entries that it has passed, and take them
/// for those a lap ahead.
class Ringer {
 public:
  /// What kernels publish at `pair.doorbell` goes to the record, and is rung by the device's register. All rings come
  /// before start().
  void add(const RdmaQueuePair& pair, std::uint32_t* record, volatile std::uint64_t* reg) {
    rings_.push_back({pair.doorbell, record, reg, pair.number});
  }
  /// Looks once at every ring, and rings for those with new entries; false: there are none.
  bool step();
  /// Starts the thread, which does that again and again. See polling_thread().
  void start(std::vector<int> cpus) {
    thread_ = polling_thread(std::move(cpus), /*for_device=*/true, [this] { return step(); });
  }

 private:
  struct Ring {
    const std::uint64_t* index;
    std::uint32_t* record;
    volatile std::uint64_t* reg;
    std::uint32_t number;  ///< of its queue pair
    std::uint64_t rung = 0;
  };

  std::vector<Ring> rings_;
  std::jthread thread_;  ///< last: uses the rings
};

}  // namespace deep_ep::rdma
