#include "csrc/rdma/verbs/nic_rails.hpp"

#include <array>
#include <chrono>
#include <thread>

#include "csrc/rdma/verbs/verbs_wire.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

class NicPaths final : public Paths {
 public:
  NicPaths(const NicAccess& own, std::size_t count, const LandingNics& landings)
      : name_(own.nic.name()),
        sink_registration_(own.device, {.address = &sink_, .bytes = sizeof sink_}),
        wire_(own.device, count, 1, hasty(own.path)),
        landings_(count),
        signal_keys_(count) {
    for (std::size_t path = 0; path < count; ++path) {
      const std::size_t rails = count / 2;
      if (path < rails || landings.of_rail.empty() || !landings.of_rail[path - rails]) continue;
      const LandingNic& nic = *landings.of_rail[path - rails];
      landings_[path].emplace(nic, hasty(nic.path));
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
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    std::array<WireCompletion, 1> answer;
    // A path that was given up may still fail; its completion says nothing of this one.
    while (wire_.poll(answer) == 0 || answer[0].queue_pair != operation.queue_pair) {
      if (std::chrono::steady_clock::now() > end) {
        fail<SystemError>("RDMA device {}: a message that tries a path is not complete within 5 s", name_);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (answer[0].syndrome == Syndrome::none) return;
    fail<SystemError>("RDMA device {}: a message that tries a path has failed: {}", name_, text(answer[0].syndrome));
  }

 private:
  static PathOptions hasty(PathOptions path) {
    path.ack_timeout = 14;  // 67 ms; devices take up to four times as long
    path.retry_count = 3;
    return path;
  }

  std::string name_;
  std::uint64_t sink_ = 0;
  Registration sink_registration_;
  VerbsWire wire_;
  std::vector<std::optional<Landing>> landings_;
  std::vector<std::uint32_t> signal_keys_;  ///< of the peers' heaps; 0: they have not said
};

}  // namespace

LandingNics open_landing_nics(const NicAccess& own, std::size_t own_rail, std::span<const NicPlace> places,
                              const SymmetricHeap& heap) {
  LandingNics nics{std::vector<std::optional<LandingNic>>(places.size())};
  for (std::size_t rail = 0; rail < places.size(); ++rail) {
    if (rail == own_rail) continue;
    const std::shared_ptr<Device> device = std::make_shared<Device>(places[rail].name.data(), own.device->functions());
    PathOptions path = own.path;
    path.port = places[rail].port;
    path.gid_index = places[rail].gid_index;
    nics.of_rail[rail] = LandingNic{device, path, register_heap(own, device, heap), make_completion_queue(device, 1)};
  }
  return nics;
}

std::unique_ptr<Paths> make_nic_paths(const NicAccess& own, std::size_t count, const LandingNics& landings) {
  return std::make_unique<NicPaths>(own, count, landings);
}

}  // namespace deep_ep::rdma::verbs
