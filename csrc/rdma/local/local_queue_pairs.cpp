#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/rdma/connections.hpp"
#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/local/local_wire.hpp"
#include "csrc/rdma/queue_pair_set.hpp"
#include "csrc/rdma/ring/cpu_nic_handler.hpp"
#include "csrc/rdma/ring/pinned_words.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma {
namespace {

/// A kernel that waits for a peer needs this wire's thread, which calls CUDA. While CUDA loads another kernel for the
/// first time it lets nobody else in and waits for the running one: neither goes on before the deadline.
void warn_of_lazy_loading() {
  if (process_environment("CUDA_MODULE_LOADING") == "EAGER") return;
  log::warn(
      "wire 'local' on GPUs: a kernel that is loaded while a low-latency call waits stops both until the deadline; set "
      "CUDA_MODULE_LOADING=EAGER");
}

constexpr std::uint32_t kSinkKey = 1;  // below those of heaps, local_key_of_rank()

class LocalQueuePairs final : public QueuePairSet {
 public:
  explicit LocalQueuePairs(const QueuePairPlan& plan)
      : heap_(plan.heap),
        sinks_(plan.executor, static_cast<std::size_t>(plan.options.channels) * plan.options.peers.size()) {
    const int rank = plan.bootstrap.rank();
    const bool cuda = plan.executor->device().kind == Device::Kind::cuda;
    if (cuda) warn_of_lazy_loading();
    auto wire = std::make_unique<LocalWire>(cuda ? make_executor_memory(plan.executor) : make_host_memory());
    wire->add_memory(local_key_of_rank(rank), heap_->local(), heap_->bytes());
    if (sinks_.count() != 0) wire->add_memory(kSinkKey, sinks_.data(), sinks_.bytes());
    for (const int peer : plan.options.peers) {
      std::byte* const mapped = heap_->peers()[static_cast<std::size_t>(peer)];
      if (mapped == nullptr) {
        fail<SystemError>(
            "rank {} reaches rank {} over the wire 'local', but has not mapped its heap: they are not on "
            "one host",
            rank, peer);
      }
      wire->add_memory(local_key_of_rank(peer), mapped, heap_->bytes());
    }
    for (int channel = 0; channel < plan.options.channels; ++channel) {
      for (const int peer : plan.options.peers) add_ring(plan, *wire, channel, peer);
    }
    handler_ = std::make_unique<CpuNicHandler>(std::move(wire));
    for (const auto& ring : rings_) {
      const RingOptions& options = ring->options();
      handler_->add({options.number, options.depth, ring->ring(), ring->completion(), ring->producer_index(), 0,
                     options.peer, "wire local"});
    }
  }

  std::optional<Failure> failure() const override { return handler_->failure(); }
  bool idle() const override { return handler_->idle(); }
  std::string describe() const override { return "handler cpu, wire local"; }

 private:
  void add_ring(const QueuePairPlan& plan, LocalWire& wire, int channel, int peer) {
    const std::size_t index = rings_.size();
    const auto number = static_cast<std::uint32_t>(1 + channel * plan.bootstrap.size() + peer);
    rings_.push_back(std::make_unique<RingMemory>(
        plan.executor, RingOptions{number, plan.options.depth, plan.options.batch, peer, 0}));
    wire.add_queue_pair(number);
    const std::uint32_t theirs = local_key_of_rank(peer);
    RdmaPeerParams& params = plan.peer(channel, peer);
    params = {rings_.back()->queue_pair(), local_key_of_rank(plan.bootstrap.rank()), theirs, theirs};
    params.queue.sink = {sizeof(std::uint64_t) * index, kSinkKey};
  }

  std::shared_ptr<SymmetricHeap> heap_;
  PinnedWords sinks_;
  std::vector<std::unique_ptr<RingMemory>> rings_;
  std::unique_ptr<CpuNicHandler> handler_;  ///< last: its thread uses the rest
};

}  // namespace

std::unique_ptr<QueuePairSet> make_local_queue_pairs(const QueuePairPlan& plan) {
  std::unique_ptr<QueuePairSet> made;
  agree(plan.bootstrap, "making RDMA connections", [&] { made = std::make_unique<LocalQueuePairs>(plan); });
  return made;
}

}  // namespace deep_ep::rdma
