#include "csrc/rdma/verbs/nic_rails.hpp"

#include <array>
#include <chrono>
#include <thread>

#include "csrc/rdma/verbs/verbs_wire.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

class NicPaths final : public Paths {
 public:
  NicPaths(const WireFacts& own, std::size_t count, const LandingNics& landings, const VerbsFunctions& functions)
      : device_(std::make_shared<Device>(own.nic.data(), hasty(own.path), functions)),
        sink_registration_(device_, {.address = &sink_, .bytes = sizeof sink_}),
        wire_(device_, count, 1),
        landings_(count),
        signal_keys_(count) {
    for (std::size_t path = count / 2; path < count && !landings.of_rail.empty(); ++path) {
      const std::optional<HeapOnNic>& nic = landings.of_rail[path - count / 2];
      if (nic) landings_[path].emplace(*nic, make_completion_queue(nic->device, 1));
    }
  }

  QueuePairAddress address(std::size_t path) const override {
    return landings_[path] ? landings_[path]->address : wire_.queue_pair(path).address();
  }
  void connect(std::size_t path, const QueuePairAddress& peer) override {
    signal_keys_[path] = peer.signal_key;
    (landings_[path] ? landings_[path]->queue_pair : wire_.queue_pair(path)).connect(peer);
  }

  void reach(std::size_t path) override {
    // A write of no bytes is answered like any other. Into memory: 0 is added to its first word.
    Operation operation{
        .opcode = device::rdma::kOpcodeWrite, .queue_pair = wire_.queue_pair(path).number(), .signalled = true};
    if (signal_keys_[path] != 0) {
      operation.opcode = device::rdma::kOpcodeFetchAdd;
      operation.length = sizeof sink_;
      operation.local = {sink_registration_.first_address(), sink_registration_.local_key()};
      operation.remote.key = signal_keys_[path];
    }
    wire_.post({&operation, 1});
    const Deadline deadline(5);
    std::array<WireCompletion, 1> answer;
    // A path that was given up may still fail; its completion says nothing of this one.
    while (wire_.poll(answer) == 0 || answer[0].queue_pair != operation.queue_pair) {
      if (deadline.expired()) {
        fail<SystemError>("RDMA device {}: a message that tries a path is not complete within {} s",
                          device_->port_name(), deadline.seconds());
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (answer[0].syndrome == Syndrome::none) return;
    fail<SystemError>("RDMA device {}: a message that tries a path has failed: {}", device_->port_name(),
                      text(answer[0].syndrome));
  }

 private:
  static PathOptions hasty(PathOptions path) {
    path.ack_timeout = 14;  // 67 ms; devices take up to four times as long
    path.retry_count = 3;
    return path;
  }

  std::shared_ptr<Device> device_;
  std::uint64_t sink_ = 0;
  Registration sink_registration_;
  VerbsWire wire_;
  std::vector<std::optional<Landing>> landings_;
  std::vector<std::uint32_t> signal_keys_;  ///< of the peers' heaps; 0: they have not said
};

}  // namespace

LandingNics open_landing_nics(const NicAccess& own, std::size_t own_rail, std::span<const WireFacts> ranks,
                              const SymmetricHeap& heap, const VerbsFunctions& functions) {
  LandingNics nics{std::vector<std::optional<HeapOnNic>>(ranks.size())};
  for (std::size_t rail = 0; rail < ranks.size(); ++rail) {
    if (rail == own_rail) continue;
    nics.of_rail[rail] = own.open(ranks[rail].nic.data(), ranks[rail].path, functions, heap);
  }
  return nics;
}

std::unique_ptr<Paths> make_nic_paths(const WireFacts& own, std::size_t count, const LandingNics& landings,
                                      const VerbsFunctions& functions) {
  return std::make_unique<NicPaths>(own, count, landings, functions);
}

}  // namespace deep_ep::rdma::verbs
