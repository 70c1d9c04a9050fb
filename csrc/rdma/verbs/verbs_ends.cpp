#include <algorithm>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/cpu_handler.hpp"
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
  const auto most_completions = static_cast<std::uint32_t>(device.limits().max_cqe);
  const auto most_requests = static_cast<std::uint32_t>(device.limits().max_qp_wr);
  const auto pairs = static_cast<std::uint32_t>(options.ends());
  const std::uint32_t share = most_completions / pairs;
  if (share < kLeast || most_requests < kLeast) {
    fail<SystemError>(
        "RDMA device {}: {} queue pairs with {} requests each under way are too many for it (completion queues hold "
        "{}, send queues {})",
        device.name(), pairs, kLeast, most_completions, most_requests);
  }
  return std::min({options.depth, kEnough, share, most_requests});
}

class VerbsEnds final : public NicEnds {
 public:
  VerbsEnds(const NicAccess& nic, const std::shared_ptr<Executor>& executor, HeapRegistration heap,
            const ConnectionOptions& options)
      : NicEnds(nic, std::move(heap), options),
        wire_(std::make_unique<VerbsWire>(nic.device, options.ends(), send_depth(*nic.device, options), nic.path)) {
    make_rings(executor, {});
    for (std::size_t end = 0; end < options.ends(); ++end) {
      served_.push_back({.number = wire_->queue_pair(end).number(), .peer = options.peer(end)});
    }
  }

  QueuePairAddress address(std::size_t end) const override { return heap_.at(wire_->queue_pair(end).address()); }

  RdmaPeerParams connect(std::size_t end, const QueuePairAddress& peer) override {
    wire_->queue_pair(end).connect(peer);
    return params_of(end, rings_->queue_pair(end, served_[end].number, served_[end].peer), peer);
  }

  void start() override {
    handler_ = std::make_unique<CpuHandler>(std::move(wire_), *rings_, served_, nic_.nic.name(), nic_.nic.nic.cpus);
  }

  std::optional<Failure> failure() const override { return handler_->failure(); }
  bool idle() const override { return handler_->idle(); }
  std::string describe() const override {
    return fmt::format("handler cpu, wire verbs, NIC {}, heap registered as {}", nic_.nic.name(),
                       to_string(heap_.signals.path()));
  }

 private:
  std::unique_ptr<VerbsWire> wire_;  ///< until the handler has it
  std::vector<CpuHandler::QueuePair> served_;
  std::unique_ptr<CpuHandler> handler_;  ///< last: its thread uses the rest
};

}  // namespace

std::unique_ptr<Ends> make_verbs_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                      HeapRegistration heap, const ConnectionOptions& options) {
  return std::make_unique<VerbsEnds>(nic, executor, std::move(heap), options);
}

}  // namespace deep_ep::rdma::verbs
