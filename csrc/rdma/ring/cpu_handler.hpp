// The handler `cpu`: a thread that does for any wire what an mlx5 device does for its rings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/failure.hpp"
#include "csrc/rdma/ring/wire.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma {

/// Reads the producer indices that kernels publish, decodes the entries behind them, posts them to its wire and writes
/// completion entries. One thread and one wire for all rings. Whether all is done, the memory of the rings says.
class CpuHandler {
 public:
  /// `device`: NIC and port, or wire, for messages. The wire outlives the handler.
  CpuHandler(Wire& wire, std::string device) : wire_(wire), device_(std::move(device)) {}
  /// Serves a queue pair, in host memory, as kernels see it. The wire knows it by its place among those added.
  void add(const RdmaQueuePair& queue_pair) { rings_.push_back({.pair = queue_pair}); }
  /// Starts the thread; without it everything happens in step(). See polling_thread().
  void start(std::vector<int> cpus, bool for_device);

  /// The first operation that failed on any ring; empty: none did. From any thread.
  std::string failure() const;

  /// One round over all rings: takes new entries, posts, completes. False if there was nothing to do. Never throws:
  /// what the wire throws becomes the failure of every ring.
  bool step();

 private:
  struct Ring {
    /// Entries before it may be read.
    std::uint64_t rung() const { return __atomic_load_n(pair.doorbell, __ATOMIC_ACQUIRE); }
    Operation decode(std::uint64_t index) const {
      return device::rdma::decode(pair.ring[index & (pair.depth - 1)], index, pair.number);
    }

    RdmaQueuePair pair;
    std::uint64_t taken = rung();     ///< entries that the wire has
    std::uint64_t completed = taken;  ///< entries that completion entries have reported
    std::string refusal = {};         ///< of the last one taken: why it fails, when those before it are complete
    bool failed = false;              ///< the error entry is written; nothing more is done
  };

  bool take_entries(std::size_t place);
  bool complete();
  /// Writes the error entry. `why` has syndrome (0: only the detail says why) and vendor code.
  void fail_ring(Ring& ring, std::uint64_t index, RdmaFailure why, const std::string& detail = {});

  Wire& wire_;
  std::string device_;
  std::vector<Ring> rings_;
  std::vector<Operation> operations_;  ///< that the wire is to take
  mutable std::mutex mutex_;
  std::string failure_;  ///< under the mutex
  std::jthread thread_;  ///< last: uses all of the above
};

}  // namespace deep_ep::rdma
