// The ends of a rank's queue pairs on its NIC, as one of the handlers needs them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/rdma/ring/failure.hpp"
#include "csrc/rdma/verbs/nic_access.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma::verbs {

/// Queue pairs are made by the constructor. Then all are connected, then start() is called, then kernels use them.
class NicEnds {
 public:
  virtual ~NicEnds() = default;
  virtual const QueuePairAddress& address(std::size_t i) const = 0;
  virtual void connect(std::size_t i, const QueuePairAddress& peer) = 0;
  virtual void start() = 0;
  /// What kernels need, but for the sink.
  virtual RdmaQueuePair queue(std::size_t i) const = 0;
  virtual std::optional<Failure> failure() const = 0;
  /// See QueuePairSet.
  virtual bool idle() const = 0;
  virtual std::string describe() const = 0;  ///< "handler cpu, wire verbs"
};

struct NicEndsOptions {
  std::vector<int> peers;  ///< of each queue pair
  std::uint32_t depth = 0;
  std::uint32_t batch = 0;
};

/// Handler `cpu`: verbs queue pairs, rings in pinned memory.
std::unique_ptr<NicEnds> make_cpu_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                       const NicEndsOptions& options);

/// Handler `gpu`: DevX queue pairs. Rings lie in the GPU's memory, or in pinned memory where the device cannot use
/// that. SystemError: kernels of this executor cannot drive this device, and why.
std::unique_ptr<NicEnds> make_gpu_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                       const NicEndsOptions& options);

}  // namespace deep_ep::rdma::verbs
