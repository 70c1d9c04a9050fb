// The handler `cpu`: a thread that does for any wire what an mlx5 device does for its rings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
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
  CpuHandler(Wire& wire, std::string device);
  ~CpuHandler();
  /// Serves a queue pair, in host memory, as kernels see it. The wire knows it by its place among those added.
  void add(const RdmaQueuePair& queue_pair);
  /// Starts the thread; without it everything happens in step(). See polling_thread().
  void start(std::vector<int> cpus, bool for_device);

  /// The first operation that failed on any ring, if one did. From any thread.
  std::optional<Failure> failure() const;

  /// One round over all rings: takes new entries, posts, completes. False if there was nothing to do. Never throws:
  /// what the wire throws becomes the failure of every ring.
  bool step();

 private:
  struct Ring;

  bool take_entries(std::size_t place);
  bool complete();
  /// Writes the error entry. `failure` has index, syndrome (or only a detail, if it is not the wire's verdict) and
  /// vendor code.
  void fail_ring(Ring& ring, Failure failure);

  Wire& wire_;
  std::string device_;
  std::vector<Ring> rings_;
  std::vector<Operation> operations_;  ///< that the wire is to take
  mutable std::mutex mutex_;
  std::optional<Failure> failure_;  ///< under the mutex
  std::jthread thread_;             ///< last: uses all of the above
};

}  // namespace deep_ep::rdma
