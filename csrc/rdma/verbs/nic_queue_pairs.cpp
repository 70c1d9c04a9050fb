#include "csrc/rdma/verbs/nic_queue_pairs.hpp"

#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/rdma/connections.hpp"
#include "csrc/rdma/ring/handler_choice.hpp"
#include "csrc/rdma/ring/pinned_words.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// What one end of a queue pair tells the other.
struct End {
  QueuePairAddress address;
  std::uint32_t remote_key = 0;  ///< of the heap
  std::uint32_t padding = 0;
};

std::unique_ptr<NicEnds> make_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                   const NicEndsOptions& options) {
  // Nothing to try, and nothing to warn of.
  if (!nic.gpu_memory && nic.handler == "auto") return make_cpu_ends(nic, executor, options);
  std::unique_ptr<NicEnds> ends;
  const NicHandlerKind kind = choose_nic_handler(nic.handler, [&]() -> std::string {
    try {
      ends = make_gpu_ends(nic, executor, options);
      return "";
    } catch (const SystemError& error) {
      return error.what();
    }
  });
  return kind == NicHandlerKind::gpu ? std::move(ends) : make_cpu_ends(nic, executor, options);
}

class NicQueuePairs final : public QueuePairSet {
 public:
  NicQueuePairs(const QueuePairPlan& plan, const std::function<NicAccess()>& open) : heap_(plan.heap) {
    agree(plan.bootstrap, "making RDMA queue pairs", [&] {
      if (!plan.options.peers.empty()) make(plan, open());
    });
    const std::vector<End> theirs = exchange(plan);
    agree(plan.bootstrap, "connecting RDMA queue pairs", [&] { connect(plan, theirs); });
  }

  std::optional<Failure> failure() const override { return ends_ ? ends_->failure() : std::nullopt; }
  bool idle() const override { return !ends_ || ends_->idle(); }

  std::string describe() const override {
    if (!ends_) return "no NIC needed";
    return fmt::format("{}, NIC {}, heap registered as {}", ends_->describe(), name_,
                       to_string(heap_registration_->path()));
  }

 private:
  void make(const QueuePairPlan& plan, const NicAccess& nic) {
    name_ = nic.name;
    heap_registration_ = nic.register_heap(heap_->local(), heap_->bytes());
    NicEndsOptions options{.peers = {}, .depth = plan.options.depth, .batch = plan.options.batch};
    for (int channel = 0; channel < plan.options.channels; ++channel) {
      options.peers.insert(options.peers.end(), plan.options.peers.begin(), plan.options.peers.end());
    }
    sinks_.emplace(plan.executor, options.peers.size());
    sink_registration_ = Registration::of_host_memory(
        nic.device, {.address = sinks_->data(), .bytes = sinks_->bytes(), .first_address = {}}, Ordering::strict);
    ends_ = make_ends(nic, plan.executor, options);
  }

  /// [ranks][channels][ranks]: what rank a says of its queue pair to rank b.
  std::vector<End> exchange(const QueuePairPlan& plan) const {
    std::vector<End> mine(plan.peers.size());
    const auto num_ranks = static_cast<std::size_t>(plan.bootstrap.size());
    std::size_t i = 0;
    for (std::size_t channel = 0; channel < mine.size() / num_ranks; ++channel) {
      for (const int peer : plan.options.peers) {
        mine[channel * num_ranks + static_cast<std::size_t>(peer)] = {ends_->address(i++),
                                                                      heap_registration_->remote_key()};
      }
    }
    const std::vector<std::byte> bytes = plan.bootstrap.all_gather(std::as_bytes(std::span(mine)));
    std::vector<End> all(mine.size() * num_ranks);
    std::memcpy(static_cast<void*>(all.data()), bytes.data(), bytes.size());
    return all;
  }

  void connect(const QueuePairPlan& plan, const std::vector<End>& theirs) {
    if (!ends_) return;
    const auto num_ranks = static_cast<std::size_t>(plan.bootstrap.size());
    const auto me = static_cast<std::size_t>(plan.bootstrap.rank());
    std::size_t i = 0;
    for (int channel = 0; channel < plan.options.channels; ++channel) {
      for (const int peer : plan.options.peers) {
        const std::size_t to_me = static_cast<std::size_t>(channel) * num_ranks + me;
        const End& end = theirs[static_cast<std::size_t>(peer) * plan.peers.size() + to_me];
        ends_->connect(i, end.address);
        RdmaPeerParams& params = plan.peer(channel, peer);
        params = {ends_->queue(i), heap_registration_->local_key(), end.remote_key, end.remote_key};
        const auto sink = reinterpret_cast<std::uint64_t>(sinks_->data() + i);
        params.queue.sink = {sink, sink_registration_->local_key()};
        ++i;
      }
    }
    ends_->start();
  }

  std::shared_ptr<SymmetricHeap> heap_;
  std::string name_;
  std::optional<PinnedWords> sinks_;
  std::optional<Registration> heap_registration_;
  std::optional<Registration> sink_registration_;
  std::unique_ptr<NicEnds> ends_;  ///< last: a handler's thread uses the rest
};

}  // namespace

std::unique_ptr<QueuePairSet> make_nic_queue_pairs(const QueuePairPlan& plan, const std::function<NicAccess()>& open) {
  return std::make_unique<NicQueuePairs>(plan, open);
}

}  // namespace deep_ep::rdma::verbs
