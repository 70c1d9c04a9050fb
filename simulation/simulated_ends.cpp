#include "simulation/simulated_ends.hpp"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/memory/executor_memory.hpp"
#include "csrc/rdma/local/local_ends.hpp"
#include "csrc/rdma/ring/polling.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/ring/ringer.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#include "simulation/kernels/simulated_pieces.hpp"
#include "simulation/nic_runner.hpp"

namespace deep_ep::rdma {
namespace {

// Keys: one of the words for old values, then one of each rank's heap.
constexpr std::uint32_t kFirstSimulatedKey = 0x20000;
std::uint32_t simulated_key_of_rank(int rank) { return kFirstSimulatedKey + 1 + static_cast<std::uint32_t>(rank); }

/// A fabric of rails: a NIC's LID says on which it is.
std::uint16_t lid_of(int rank, const SimulatedNic& nic) {
  return nic.rails == 0 ? std::uint16_t{0} : static_cast<std::uint16_t>(1 + rank % nic.rails);
}
void require_rail(const QueuePairAddress& peer, int rank, const SimulatedNic& nic) {
  if (nic.rails == 0 || peer.lid == lid_of(rank, nic)) return;
  fail<SystemError>("the simulated NIC of rank {} is on rail {} and has no route to rail {}", rank,
                    lid_of(rank, nic) - 1, peer.lid - 1);
}

/// What a message takes from its doorbell to what the peer sees, besides the time for which it is held: measured
/// between two H200, less some tenths, as no message is to be sooner than it was told.
constexpr double kOwnNsOnGpu = 6000;

/// With the rate and the latency of a device that says none.
SimulatedNic with_defaults(SimulatedNic nic, bool cuda) {
  nic.gb_per_s = nic.gb_per_s.value_or(cuda ? 50 : 0);
  nic.latency_us = nic.latency_us.value_or(cuda ? 3 : 0);
  return nic;
}

std::string describe_speed(const SimulatedNic& nic) {
  std::string text = *nic.gb_per_s == 0 ? "no limit" : fmt::format("{:.4g} GB/s", *nic.gb_per_s);
  text += fmt::format(", {:.4g} us", *nic.latency_us);
  if (nic.reorder_us != 0) text += fmt::format(", payload up to {:.4g} us late", nic.reorder_us);
  if (nic.completion_us != 0) text += fmt::format(", completions up to {:.4g} us late", nic.completion_us);
  return text;
}

class SimulatedEnds final : public Ends {
 public:
  SimulatedEnds(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap, const ConnectionOptions& options,
                const SimulatedNic& nic, NicHandler handler)
      : Ends(options, "wire simulated"),
        executor_(backend_of(executor)),
        on_gpu_(executor->device().kind == Device::Kind::cuda),
        nic_(with_defaults(nic, on_gpu_)),
        regions_(1 + heap.peers().size()),
        sinks_(device_copy(executor, std::vector<std::uint64_t>(count()))),
        // Those that a thread rings lie where it and the kernel reach them.
        doorbells_(handler == NicHandler::doorbell
                       ? pinned_memory<std::uint64_t>(executor, count() * sizeof(std::uint64_t))
                       : device_copy(executor, std::vector<std::uint64_t>(count()))),
        states_(device_copy(executor, std::vector<SimulatedQueueState>(count()))),
        blocks_(nic.multiprocessors != 0           ? nic.multiprocessors
                : on_gpu_ && options.long_messages ? SimulatedNicParams::kMostBlocks
                                                   : 1) {
    rings_.emplace(executor, options.rings({.on_gpu = true}));
    params_.speed = {.ns_per_byte = *nic_.gb_per_s == 0 ? 0 : 1 / *nic_.gb_per_s,
                     .held_ns = std::max(0.0, *nic_.latency_us * 1e3 - (on_gpu_ ? kOwnNsOnGpu : 0)),
                     .reorder_ns = static_cast<std::uint64_t>(nic_.reorder_us * 1e3),
                     .completion_ns = static_cast<std::uint64_t>(nic_.completion_us * 1e3)};
    if (on_gpu_) params_.pieces = device::simulated::kMostPieces;
    if (blocks_ > 1) lending_ = device_copy(executor, std::vector<device::simulated::Lending>(1));
    check_room();
    if (handler == NicHandler::doorbell) ringer_.emplace(executor, count());
    regions_[0] = {reinterpret_cast<std::byte*>(sinks_.get()), count() * sizeof(std::uint64_t)};
    regions_[1 + static_cast<std::size_t>(options_.rank)] = {heap.local(), heap.bytes()};
    for (const int peer : options_.peers) {
      regions_[1 + static_cast<std::size_t>(peer)] = {mapped_heap(heap, options_.rank, peer, "simulated"),
                                                      heap.bytes()};
    }
  }

  QueuePairAddress address(std::size_t end) const override {
    return {.queue_pair = number_of(end),
            .lid = lid_of(options_.rank, nic_),
            .heap_key = simulated_key_of_rank(options_.rank),
            .signal_key = simulated_key_of_rank(options_.rank) | kSimulatedSignalKey};
  }

  RdmaPeerParams connect(std::size_t end, const QueuePairAddress& peer) override {
    require_rail(peer, options_.rank, nic_);
    RdmaQueuePair queue = rings_->queue_pair(end, number_of(end), options_.peer(end), {0, kFirstSimulatedKey});
    if (ringer_) {
      ringer_->connect(end, queue, doorbells_.get() + end);
    } else {
      queue.doorbell = doorbells_.get() + end;
      queue.doorbell_record = rings_->doorbell_record(end);
    }
    queue.system_scope = false;  // all that the kernel reads is served by the same device
    return {queue, simulated_key_of_rank(options_.rank), peer.heap_key, peer.signal_key};
  }

  QueuePairAddress landing(std::size_t end) const override {
    QueuePairAddress landing = address(end);
    landing.lid = static_cast<std::uint16_t>(1 + options_.rail_of(options_.peer(end)));
    return landing;
  }

  void start() override {
    queues_ = device_copy(std::shared_ptr<Executor>(executor_), table());
    device_regions_ = device_copy(std::shared_ptr<Executor>(executor_), regions_);
    params_.queues = queues_.get();
    params_.doorbells = doorbells_.get();
    params_.states = states_.get();
    params_.regions = device_regions_.get();
    params_.num_queues = static_cast<int>(count());
    params_.num_regions = static_cast<int>(regions_.size());
    params_.first_key = kFirstSimulatedKey;
    params_.heap_key = simulated_key_of_rank(options_.rank);
    params_.lending = lending_.get();
    params_.lent_behind = on_gpu_ ? 128 : 4;  // a piece is some 10 us under way; on the CPU that some are lent is all
    // As many warps that move as there is room for.
    int threads = on_gpu_ ? kernels::simulated_nic::kMaxThreads : SimulatedNicParams::kFewestThreads;
    while (shared_bytes(threads) > executor_->policy().max_shared_bytes) threads -= 32;
    runner_ = std::make_unique<NicRunner>(executor_, params_, LaunchShape{blocks_, threads, shared_bytes(threads)});
    if (ringer_) thread_ = polling_thread({}, /*for_device=*/true, [this] { return ringer_->step(); });
  }

  NicHandler handler() const override { return ringer_ ? NicHandler::doorbell : NicHandler::gpu; }

  std::string describe() const override {
    return fmt::format("handler {}, wire simulated ({}{})", name_of(handler()), describe_speed(nic_),
                       blocks_ > 1 ? fmt::format(", {} SMs", blocks_) : "");
  }

 private:
  std::optional<Failure> executor_failure() const override {
    const std::string why = runner_ == nullptr ? std::string() : runner_->failure();
    if (why.empty()) return std::nullopt;
    return Failure{.of_device = true, .device = device_, .detail = fmt::format("is gone: {}", why)};
  }

  std::size_t count() const { return options_.ends(); }
  std::uint32_t number_of(std::size_t end) const { return 1 + static_cast<std::uint32_t>(end); }
  std::size_t shared_bytes(int threads) const {
    const int movers = threads / 32 - 3;
    return device::simulated::Shared(Carver::without_memory(), count(), regions_.size(),
                                     static_cast<std::size_t>(movers), params_.pieces)
        .bytes;
  }

  void check_room() const {
    const std::size_t room = executor_->policy().max_shared_bytes;
    if (shared_bytes(SimulatedNicParams::kFewestThreads) <= room) return;
    fail<SystemError>("the simulated NIC has room for {} in a block, {} queue pairs need {}: use fewer ranks",
                      format_bytes(room), count(), format_bytes(shared_bytes(SimulatedNicParams::kFewestThreads)));
  }

  std::vector<SimulatedQueue> table() const {
    std::vector<SimulatedQueue> queues(count());
    for (std::size_t end = 0; end < count(); ++end) {
      std::uint32_t* const record = ringer_ ? ringer_->record(end) : rings_->doorbell_record(end);
      queues[end] = {rings_->ring(end), rings_->completion(end), record,
                     number_of(end),    rings_->options().depth, simulated_key_of_rank(options_.peer(end))};
      if (options_.channel(end) + 1 == nic_.slow) queues[end].way_ns_per_byte = 1 / nic_.slow_gb_per_s;
    }
    return queues;
  }

  std::shared_ptr<Backend> executor_;
  bool on_gpu_;
  SimulatedNic nic_;
  std::vector<SimulatedRegion> regions_;  ///< by key
  std::shared_ptr<std::uint64_t> sinks_;
  std::shared_ptr<std::uint64_t> doorbells_;
  std::shared_ptr<SimulatedQueueState> states_;
  std::shared_ptr<SimulatedQueue> queues_;
  std::shared_ptr<SimulatedRegion> device_regions_;
  int blocks_;
  std::shared_ptr<device::simulated::Lending> lending_;
  SimulatedNicParams params_;
  std::optional<Ringer> ringer_;       ///< handler `doorbell`
  std::unique_ptr<NicRunner> runner_;  ///< uses the rest
  std::jthread thread_;                ///< last: that of the ringer
};

}  // namespace

std::unique_ptr<Ends> make_simulated_ends(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap,
                                          const ConnectionOptions& options, const SimulatedNic& nic,
                                          NicHandler handler) {
  return std::make_unique<SimulatedEnds>(executor, heap, options, nic, handler);
}

}  // namespace deep_ep::rdma
