// The handler `doorbell`: kernels fill rings in their GPU's memory, and publish how far in host memory, as for the
// handler `cpu`. A thread rings the device for them. Neither the GPU nor this process needs any privilege for that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "deep_ep/executor.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma {

/// The producer indices of all rings lie side by side, so a look at all of them reads few lines.
///
/// The thread writes the doorbell records too. A kernel's would be ahead of doorbells that the thread has yet to ring:
/// a device that reads it to recover a lost doorbell would then be rung for entries that it has passed, and take them
/// for those a lap ahead.
class Ringer {
 public:
  Ringer(const std::shared_ptr<Executor>& executor, std::size_t rings);

  /// What kernels that use `pair` publish is rung by the device's register `reg`. All rings are connected before
  /// step().
  void connect(std::size_t ring, RdmaQueuePair& pair, volatile std::uint64_t* reg);
  /// Doorbell records, 8 bytes each, for the device; in pinned memory, on pages of their own.
  std::uint32_t* records() const { return records_; }
  std::size_t record_bytes() const;
  /// That of a ring's send queue.
  std::uint32_t* record(std::size_t ring) const { return records_ + 2 * ring + 1; }

  /// Looks once at every ring, and rings for those with new entries; false: there are none.
  bool step();

 private:
  struct Ring {
    volatile std::uint64_t* reg = nullptr;
    std::uint32_t number = 0;  ///< of its queue pair
    std::uint64_t rung = 0;
  };

  std::vector<Ring> rings_;
  std::shared_ptr<std::byte> memory_;
  std::uint32_t* records_;
  std::uint64_t* indices_;  ///< [rings], producer indices
};

}  // namespace deep_ep::rdma
