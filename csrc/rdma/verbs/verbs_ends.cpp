#include <algorithm>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/cpu_handler.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/rdma/verbs/verbs_wire.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// Depth of the device's queues. A ring may be deeper: the wire takes what there is room for.
std::uint32_t send_depth(const Device& device, const ConnectionOptions& options) {
  constexpr std::uint32_t kLeast = 16;
  constexpr std::uint32_t kEnough = 512;  // more under way does not make a connection faster
  const DeviceLimits& limits = device.limits();
  const auto pairs = static_cast<std::uint32_t>(options.ends());
  const std::uint32_t share = limits.completion_queue_depth / pairs;
  if (share < kLeast || limits.queue_pair_depth < kLeast) {
    fail<SystemError>(
        "RDMA device {}: {} queue pairs with {} requests each under way are too many for it (completion queues hold "
        "{}, send queues {})",
        device.name(), pairs, kLeast, limits.completion_queue_depth, limits.queue_pair_depth);
  }
  return std::min({options.depth, kEnough, share, limits.queue_pair_depth});
}

class VerbsEnds final : public Ends {
 public:
  VerbsEnds(const NicAccess& nic, const std::shared_ptr<Executor>& executor, std::shared_ptr<Registration> heap,
            const ConnectionOptions& options)
      : name_(nic.nic.name()),
        cpus_(nic.nic.nic.cpus),
        heap_(std::move(heap)),
        rings_(executor, {.count = options.ends(),
                          .depth = options.depth,
                          .batch = options.batch,
                          .numa_node = nic.nic.nic.pci.numa_node}),
        sinks_(register_sinks(nic, rings_)) {
    const std::uint32_t depth = send_depth(*nic.device, options);
    wire_ = std::make_unique<VerbsWire>(nic.device, static_cast<std::uint32_t>(options.ends()) * depth);
    for (std::size_t end = 0; end < options.ends(); ++end) {
      pairs_.push_back(&wire_->add_queue_pair(depth, nic.path));
      served_.push_back({.number = pairs_.back()->number(), .peer = options.peer(end)});
    }
  }

  QueuePairAddress address(std::size_t end) const override {
    QueuePairAddress address = pairs_[end]->address();
    address.heap_key = heap_->remote_key();
    return address;
  }

  RdmaPeerParams connect(std::size_t end, const QueuePairAddress& peer) override {
    pairs_[end]->connect(peer);
    return peer_params(rings_.queue_pair(end, served_[end].number, served_[end].peer), *heap_, peer, sinks_, end);
  }

  void start() override { handler_ = std::make_unique<CpuHandler>(std::move(wire_), rings_, served_, name_, cpus_); }

  std::optional<Failure> failure() const override { return handler_->failure(); }
  bool idle() const override { return handler_->idle(); }
  std::string describe() const override {
    return fmt::format("handler cpu, wire verbs, NIC {}, heap registered as {}", name_, to_string(heap_->path()));
  }

 private:
  std::string name_;
  std::vector<int> cpus_;
  std::shared_ptr<Registration> heap_;
  RingMemory rings_;
  Registration sinks_;
  std::unique_ptr<VerbsWire> wire_;  ///< until the handler has it
  std::vector<QueuePair*> pairs_;    ///< the wire's
  std::vector<CpuHandler::QueuePair> served_;
  std::unique_ptr<CpuHandler> handler_;  ///< last: its thread uses the rest
};

}  // namespace

std::unique_ptr<Ends> make_verbs_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                      std::shared_ptr<Registration> heap, const ConnectionOptions& options) {
  return std::make_unique<VerbsEnds>(nic, executor, std::move(heap), options);
}

}  // namespace deep_ep::rdma::verbs
