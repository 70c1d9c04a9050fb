#include <algorithm>

#include "csrc/rdma/ring/cpu_nic_handler.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/rdma/verbs/verbs_wire.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// Of the device's queues. A ring may be deeper: the wire takes what there is room for.
std::uint32_t send_depth(const Device& device, const NicEndsOptions& options) {
  constexpr std::uint32_t kLeast = 16;
  constexpr std::uint32_t kEnough = 512;  // more under way does not make a connection faster
  const DeviceLimits& limits = device.limits();
  const auto pairs = static_cast<std::uint32_t>(options.peers.size());
  const std::uint32_t share = limits.completion_queue_depth / std::max<std::uint32_t>(1, pairs);
  if (share < kLeast || limits.queue_pair_depth < kLeast) {
    fail<SystemError>(
        "RDMA device {}: {} queue pairs with {} requests each under way are too many for it (completion queues hold "
        "{}, send queues {})",
        device.name(), pairs, kLeast, limits.completion_queue_depth, limits.queue_pair_depth);
  }
  return std::min({options.depth, kEnough, share, limits.queue_pair_depth});
}

class CpuEnds final : public NicEnds {
 public:
  CpuEnds(const NicAccess& nic, const std::shared_ptr<Executor>& executor, const NicEndsOptions& options)
      : name_(nic.name) {
    const std::uint32_t depth = send_depth(*nic.device, options);
    const auto count = static_cast<std::uint32_t>(options.peers.size());
    wire_ = std::make_unique<VerbsWire>(nic.device, std::max<std::uint32_t>(1, count * depth));
    for (const int peer : options.peers) {
      pairs_.push_back(&wire_->add_queue_pair({.send_depth = depth}, nic.path));
      rings_.push_back(std::make_unique<RingMemory>(
          executor, RingOptions{pairs_.back()->number(), options.depth, options.batch, peer, 0}));
    }
  }

  const QueuePairAddress& address(std::size_t i) const override { return pairs_[i]->address(); }
  void connect(std::size_t i, const QueuePairAddress& peer) override { pairs_[i]->connect(peer); }

  void start() override {
    handler_ = std::make_unique<CpuNicHandler>(std::move(wire_));
    for (const auto& ring : rings_) {
      const RingOptions& options = ring->options();
      handler_->add({options.number, options.depth, ring->ring(), ring->completion(), ring->producer_index(), 0,
                     options.peer, name_});
    }
  }

  RdmaQueuePair queue(std::size_t i) const override { return rings_[i]->queue_pair(); }
  std::optional<Failure> failure() const override { return handler_->failure(); }
  bool idle() const override { return handler_->idle(); }
  std::string describe() const override { return "handler cpu, wire verbs"; }

 private:
  std::string name_;
  std::vector<std::unique_ptr<RingMemory>> rings_;
  std::unique_ptr<VerbsWire> wire_;         ///< until the handler has it
  std::vector<QueuePair*> pairs_;           ///< the wire's
  std::unique_ptr<CpuNicHandler> handler_;  ///< last: its thread uses the rest
};

}  // namespace

std::unique_ptr<NicEnds> make_cpu_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                       const NicEndsOptions& options) {
  return std::make_unique<CpuEnds>(nic, executor, options);
}

}  // namespace deep_ep::rdma::verbs
