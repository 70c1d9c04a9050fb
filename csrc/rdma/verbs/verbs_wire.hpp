// The wire that executes decoded work on any RDMA device, with plain ibv_post_send and ibv_poll_cq.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/rdma/ring/wire.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"

namespace deep_ep::rdma::verbs {

/// A wire of its own for each device. Exchange the addresses of its queue pairs, connect them; then give the wire to
/// its handler. Keys are those of registrations.
///
/// The device reports only requests that ask for it, and frees their room only then: so besides those that the caller
/// wants reported, some ask in every quarter of the queue.
class VerbsWire final : public Wire {
 public:
  /// With `count` queue pairs, each for `depth` requests under way.
  VerbsWire(std::shared_ptr<Device> device, std::size_t count, std::uint32_t depth);

  const QueuePair& queue_pair(std::size_t i) const { return queues_[i].pair; }

  std::size_t depth() const override { return depth_; }
  /// SystemError for failures without a completion: a device that failed, a request that the provider refuses.
  std::size_t post(std::size_t ring, std::span<const Operation> operations) override;
  std::size_t poll(std::span<WireCompletion> completions) override;

 private:
  struct SendQueue {
    QueuePair pair;
    std::uint32_t since_reported = 0;  ///< operations handed over since the last one that asked for a completion
  };

  std::shared_ptr<Device> device_;
  std::uint32_t depth_;  ///< of each send queue
  std::shared_ptr<ibv_cq> completion_queue_;
  /// Of each ring, which is the upper half of a work request's id; the lower half is that of the operation's index.
  std::vector<SendQueue> queues_;
};

}  // namespace deep_ep::rdma::verbs
