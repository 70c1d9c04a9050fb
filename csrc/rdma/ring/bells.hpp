// The handler `doorbell`: kernels fill rings in their GPU's memory as for the handler `gpu`, and a thread rings the
// device for them. Neither the GPU nor this process needs any privilege for that.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "deep_ep/executor.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma {

/// A queue in pinned memory where kernels leave a bell for each doorbell: which ring, and how far. There is one for all
/// rings, so the thread looks at one word however many there are. It cannot run over: a bell that waits announces at
/// least one entry that the device does not know, and a ring has room for no more of them than its depth.
///
/// The thread writes the doorbell records too. A kernel's would be ahead of the bells that wait: a device that reads it
/// to recover a lost doorbell would then be rung for entries that it has passed, and take them for those a lap ahead.
class Bells {
 public:
  /// InvalidArgument where a bell cannot name so many rings. `depth`: of each of them.
  Bells(std::shared_ptr<Executor> executor, std::size_t rings, std::uint32_t depth);

  /// Kernels that use `pair` leave bells for this ring, and its doorbells go to the device's register `reg`. All rings
  /// are connected before step() or thread().
  void connect(std::size_t ring, RdmaQueuePair& pair, volatile std::uint64_t* reg);
  /// Doorbell records, 8 bytes each, for the device; in pinned memory, on pages of their own.
  std::uint32_t* records() const { return records_; }
  std::size_t record_bytes() const;
  /// That of a ring's send queue.
  std::uint32_t* record(std::size_t ring) const { return records_ + 2 * ring + 1; }

  std::jthread thread(std::vector<int> cpus);

  /// Rings for the next bell; false: there is none.
  bool step();
  /// True if a bell was overwritten before it was read, which must not happen.
  bool lost() const { return lost_.load(std::memory_order_relaxed); }

 private:
  struct Ring {
    volatile std::uint64_t* reg = nullptr;
    std::uint32_t number = 0;  ///< of its queue pair
  };

  std::vector<Ring> rings_;
  std::uint32_t bits_;  ///< the queue has 2^bits_ places
  std::shared_ptr<std::uint64_t> bells_;
  std::shared_ptr<std::uint64_t> left_;  ///< bells so far; in memory of the kernels' device
  std::shared_ptr<std::byte> record_memory_;
  std::uint32_t* records_;
  std::uint64_t next_ = 0;  ///< bells read
  std::atomic<bool> lost_{false};
};

}  // namespace deep_ep::rdma
