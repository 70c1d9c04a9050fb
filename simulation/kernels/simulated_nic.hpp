// What the kernel that plays a NIC needs: the queue pairs that it serves, the memory that keys stand for, and how fast
// it is to be.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/primitives/divisor.hpp"
#include "kernels/rdma/decode.hpp"

namespace deep_ep {

/// A heap is registered twice: additions are by the key with this bit, writes by the one without, whose bytes may come
/// in any order.
inline constexpr std::uint32_t kSimulatedSignalKey = 1u << 24;

/// A queue pair as its device sees it, and what the NIC knows of it from one launch to the next.
struct SimulatedQueue {
  const device::rdma::WorkQueueEntry* ring = nullptr;  ///< [depth]
  device::rdma::CompletionEntry* completion = nullptr;
  const std::uint32_t* doorbell_record = nullptr;
  std::uint32_t number = 0;
  std::uint32_t depth = 0;
  std::uint32_t remote_key = 0;  ///< of the one heap that it may write to
  double way_ns_per_byte = 0;    ///< of a slow path of its own; 0: as fast as the rank's own line
  std::uint64_t taken = 0;       ///< entries
  std::uint64_t way_free = 0;    ///< when the slow path is free
  bool failed = false;           ///< nothing is executed any more
};

namespace device::simulated {
struct Lending;
}

/// One block, or two, of which the second one helps to move.
struct SimulatedNicParams {
  static constexpr int kMostBlocks = 2;
  /// A warp takes entries, one finishes them, one watches, and the rest move.
  static constexpr int kFewestThreads = 128;
  static constexpr double kOverheadBytes = 64;  ///< that a message takes on the line besides its own
  static constexpr int kMoverStages = 3;        ///< pieces of a warp in shared memory

  SimulatedQueue* queues = nullptr;               ///< [num_queues]
  const std::uint64_t* doorbells = nullptr;       ///< [num_queues]: what kernels ring
  const device::rdma::Region* regions = nullptr;  ///< [num_regions]: those of first_key, first_key + 1, ...
  int num_queues = 0;
  int num_regions = 0;
  Divisor mover_stages = kMoverStages;
  std::uint32_t first_key = 0;                    ///< of the first region
  std::uint32_t heap_key = 0;                     ///< of this rank's heap, which alone may be named as local
  double ns_per_byte = 0;                         ///< of the line; 0: as fast as it goes
  double held_ns = 0;                             ///< from the last byte sent until the peer may see it
  std::uint64_t reorder_ns = 0;                   ///< pieces of payload are held up for different times below this
  std::uint64_t completion_ns = 0;                ///< completions are held up for different times below this
  device::simulated::Lending* lending = nullptr;  ///< of two blocks
  std::uint32_t lent_behind = 0;                  ///< pieces are lent where so many stand before them
  /// In host memory; not 0: no more is taken, and what was taken is finished at once.
  const std::uint64_t* stop = nullptr;
  std::uint64_t* serving = nullptr;  ///< in host memory: `launch` is stored there when the NIC begins to serve
  std::uint64_t launch = 0;
  std::uint64_t idle_ns = 0;  ///< ends after so long without work; 0: never
  std::uint64_t most_ns = 0;  ///< takes no more after so long, and after twice as long waits for nothing; 0: never
};

}  // namespace deep_ep
