#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/cpu_handler.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/rdma/verbs/verbs_wire.hpp"
#include "csrc/support/deadline.hpp"
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
  VerbsEnds(const NicAccess& nic, const std::shared_ptr<Executor>& executor, const ConnectionOptions& options)
      : NicEnds(nic, options),
        wire_(nic.heap.device, options.ends(), send_depth(*nic.heap.device, options)),
        handler_(wire_, device_) {
    make_rings(executor, {});
  }

  QueuePairAddress address(std::size_t end) const override { return nic_.heap.at(wire_.queue_pair(end).address()); }

  RdmaPeerParams connect(std::size_t end, const QueuePairAddress& peer) override {
    wire_.queue_pair(end).connect(peer, options_.hasty);
    const RdmaPeerParams params = params_of(end, wire_.queue_pair(end).number(), peer);
    handler_.add(params.queue);
    return params;
  }

  /// 0 is added to the first word of the peer's heap.
  void reach(std::size_t end, const RdmaPeerParams& params) override {
    const Operation operation{.opcode = device::rdma::kOpcodeFetchAdd,
                              .queue_pair = params.queue.number,
                              .signalled = true,
                              .length = sizeof(std::uint64_t),
                              .local = params.queue.sink,
                              .remote = {0, params.signal_key}};
    wire_.post(end, {&operation, 1});
    const Deadline deadline(5);
    std::array<WireCompletion, 1> answer;
    while (wire_.poll(answer) == 0) {
      if (deadline.expired()) {
        fail<SystemError>("RDMA device {}: a message that tries a path is not complete within {} s", device_,
                          deadline.seconds());
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (answer[0].syndrome == Syndrome::none) return;
    fail<SystemError>("RDMA device {}: a message that tries a path has failed: {}", device_, text(answer[0].syndrome));
  }

  void start() override { handler_.start(nic_.nic.nic.cpus, /*for_device=*/true); }

  std::string describe() const override {
    return fmt::format("handler cpu, wire verbs, NIC {}, heap registered as {}", device_, nic_.heap.signals.path());
  }

 private:
  std::optional<Failure> executor_failure() const override { return handler_.failure(); }

  VerbsWire wire_;
  CpuHandler handler_;  ///< last: its thread uses the rest
};

}  // namespace

std::unique_ptr<Ends> make_verbs_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                      const ConnectionOptions& options) {
  return std::make_unique<VerbsEnds>(nic, executor, options);
}

}  // namespace deep_ep::rdma::verbs
