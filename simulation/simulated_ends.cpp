#include "simulation/simulated_ends.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "csrc/executor/backend.hpp"
#include "csrc/executor/own_stream.hpp"
#include "csrc/memory/executor_memory.hpp"
#include "csrc/rdma/local/local_ends.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/ring/ringer.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/threads.hpp"
#include "simulation/kernels/simulated_pieces.hpp"

namespace deep_ep::rdma {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

/// A fabric of rails: a NIC's LID says on which it is.
std::uint16_t lid_of(int rank, const SimulatedNic& nic) {
  return nic.rails == 0 ? std::uint16_t{0} : static_cast<std::uint16_t>(1 + rank % static_cast<int>(nic.rails));
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
  if (nic.gb_per_s < 0) nic.gb_per_s = cuda ? 50 : 0;
  if (nic.latency_us < 0) nic.latency_us = cuda ? 3 : 0;
  return nic;
}

std::string describe_speed(const SimulatedNic& nic) {
  std::string text = nic.gb_per_s == 0 ? "no limit" : fmt::format("{:.4g} GB/s", nic.gb_per_s);
  text += fmt::format(", {:.4g} us", nic.latency_us);
  if (nic.reorder_us != 0) text += fmt::format(", payload up to {:.4g} us late", nic.reorder_us);
  if (nic.completion_us != 0) text += fmt::format(", completions up to {:.4g} us late", nic.completion_us);
  return text;
}

constexpr std::size_t kLaunchesAhead = 4;  ///< launches enqueued: the thread may be late by that many idle times

/// A kernel that stayed for ever would stop everybody who waits for the device (cudaDeviceSynchronize, cudaFree, a
/// kernel that is loaded for the first time). So each launch ends after a short time without work, and after a longer
/// one in any case, and a thread sees to it that several launches are always enqueued behind the one that runs. A
/// process that dies leaves no more than those.
class SimulatedEnds final : public Ends {
 public:
  SimulatedEnds(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap, const ConnectionOptions& options,
                const SimulatedNic& nic, NicHandler handler)
      : Ends(options, "wire simulated"),
        executor_(backend_of(executor)),
        on_gpu_(executor->device().kind == Device::Kind::cuda),
        nic_(with_defaults(nic, on_gpu_)),
        regions_(mapped_regions(heap, options, "simulated")),
        // Those that a thread rings lie where it and the kernel reach them.
        doorbells_(handler == NicHandler::doorbell
                       ? pinned_memory<std::uint64_t>(executor, count() * sizeof(std::uint64_t))
                       : device_copy(executor, std::vector<std::uint64_t>(count()))),
        blocks_(nic.multiprocessors != 0           ? static_cast<int>(nic.multiprocessors)
                : on_gpu_ && options.long_messages ? SimulatedNicParams::kMostBlocks
                                                   : 1),
        words_(pinned_memory<Words>(executor)),
        stream_(*executor) {
    rings_.emplace(executor, options.rings({.on_gpu = true, .records_apart = handler == NicHandler::doorbell}));
    params_.ns_per_byte = nic_.gb_per_s == 0 ? 0 : 1 / nic_.gb_per_s;
    params_.held_ns = std::max(0.0, nic_.latency_us * 1e3 - (on_gpu_ ? kOwnNsOnGpu : 0));
    params_.reorder_ns = static_cast<std::uint64_t>(nic_.reorder_us * 1e3);
    params_.completion_ns = static_cast<std::uint64_t>(nic_.completion_us * 1e3);
    if (blocks_ > 1) lending_ = device_copy(executor, std::vector<device::simulated::Lending>(1));
    // As many warps that move as there is room for.
    const std::size_t room = executor_->policy().max_shared_bytes;
    threads_ = on_gpu_ ? kernels::simulated_nic::kMaxThreads : SimulatedNicParams::kFewestThreads;
    while (threads_ > SimulatedNicParams::kFewestThreads && shared_bytes() > room) threads_ -= 32;
    if (shared_bytes() > room) {
      fail<SystemError>("the simulated NIC has room for {} in a block, {} queue pairs need {}: use fewer ranks",
                        format_bytes(room), count(), format_bytes(shared_bytes()));
    }
    if (handler == NicHandler::doorbell) ringer_.emplace();
  }

  /// The NIC finishes the operations that it has taken, and touches no memory afterwards.
  ~SimulatedEnds() override {
    ringer_.reset();
    if (!launching_.joinable()) return;
    launching_.request_stop();
    __atomic_store_n(&words_->stop, 1, __ATOMIC_RELEASE);
    launching_.join();
    try {
      executor_->make_current();
      executor_->synchronize(stream_.get());
    } catch (const std::exception& error) {
      log::warn("rdma: the simulated NIC has not ended well: {}", error.what());
    }
  }

  QueuePairAddress address(std::size_t end) const override {
    return {.queue_pair = number_of(end),
            .lid = lid_of(options_.rank, nic_),
            .heap_key = heap_key(options_.rank),
            .signal_key = heap_key(options_.rank) | kSimulatedSignalKey};
  }

  RdmaQueuePair connect(std::size_t end, const QueuePairAddress& peer) override {
    require_rail(peer, options_.rank, nic_);
    RdmaQueuePair queue = params_of(end, number_of(end), heap_key(options_.rank), peer);
    if (ringer_) {
      ringer_->add(queue, rings_->doorbell_record(end), doorbells_.get() + end);
    } else {
      queue.doorbell = doorbells_.get() + end;
      queue.doorbell_record = rings_->doorbell_record(end);
    }
    queue.system_scope = false;  // all that the kernel reads is served by the same device
    return queue;
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
    params_.regions = device_regions_.get();
    params_.num_queues = static_cast<int>(count());
    params_.num_regions = static_cast<int>(regions_.size());
    params_.first_key = heap_key(0);
    params_.heap_key = heap_key(options_.rank);
    params_.lending = lending_.get();
    params_.lent_behind = on_gpu_ ? 128 : 4;  // a piece is some 10 us under way; on the CPU that some are lent is all
    params_.stop = &words_->stop;
    params_.serving = &words_->serving;
    // On the CPU nobody waits for the device, and a launch takes as long as many polls.
    const milliseconds idle(on_gpu_ ? 2 : 20), most(on_gpu_ ? 100 : 500);
    params_.idle_ns = static_cast<std::uint64_t>(nanoseconds(idle).count());
    params_.most_ns = static_cast<std::uint64_t>(nanoseconds(most).count());
    executor_->load_kernels();
    const SignalsBlocked blocked;
    launching_ = std::jthread(
        [this, nap = idle / 2, shape = LaunchShape{blocks_, threads_, shared_bytes()}](const std::stop_token& stop) {
          name_this_thread("deep_ep_nic");
          try {
            executor_->make_current();
            while (!stop.stop_requested()) {
              launch_ahead(stop, shape);
              std::this_thread::sleep_for(nap);
            }
          } catch (const std::exception& error) {
            // A process that ends without giving its buffer back: nobody is left to care.
            const bool unloading =
                std::string_view(error.what()).find("cudaErrorCudartUnloading") != std::string_view::npos;
            if (!unloading) log::error("rdma: the simulated NIC is gone: {}", error.what());
            why_gone_ = error.what();
            gone_ = true;
          }
        });
    wait_until_serving();
    if (ringer_) ringer_->start({});
  }

  NicHandler handler() const override { return ringer_ ? NicHandler::doorbell : NicHandler::gpu; }

  std::string describe() const override {
    return fmt::format("handler {}, wire simulated ({}{})", name_of(handler()), describe_speed(nic_),
                       blocks_ > 1 ? fmt::format(", {} SMs", blocks_) : "");
  }

 private:
  std::string executor_failure() const override {
    return gone_ ? fmt::format("RDMA device {} is gone: {}", device_, why_gone_) : "";
  }

  void launch_ahead(const std::stop_token& stop, const LaunchShape& shape) {
    while (!launches_.empty() && executor_->event_done(launches_.front())) launches_.pop_front();
    while (launches_.size() < kLaunchesAhead && !stop.stop_requested()) {
      ++params_.launch;
      executor_->kernels().simulated_nic(params_, shape, stream_.get());
      launches_.push_back(executor_->record_event(stream_.get()));
    }
  }

  void wait_until_serving() const {
    const Deadline deadline(60);
    while (__atomic_load_n(&words_->serving, __ATOMIC_ACQUIRE) == 0) {
      if (gone_) fail<SystemError>("the simulated NIC does not start: {}", why_gone_);
      if (deadline.expired()) {
        fail<SystemError>(
            "the simulated NIC does not start within {} s: other kernels leave it no multiprocessor of {}",
            deadline.seconds(), to_string(executor_->device()));
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  std::size_t count() const { return options_.ends(); }
  std::uint32_t number_of(std::size_t end) const { return 1 + static_cast<std::uint32_t>(end); }
  std::size_t shared_bytes() const {
    const int movers = threads_ / 32 - 3;
    return device::simulated::Shared(Carver::without_memory(), count(), regions_.size(),
                                     static_cast<std::size_t>(movers))
        .bytes;
  }

  std::vector<SimulatedQueue> table() const {
    std::vector<SimulatedQueue> queues(count());
    for (std::size_t end = 0; end < count(); ++end) {
      queues[end] = {rings_->ring(end), rings_->completion(end), rings_->doorbell_record(end),
                     number_of(end),    rings_->options().depth, heap_key(options_.peer(end))};
      if (options_.channel(end) + 1 == nic_.slow) queues[end].way_ns_per_byte = 1 / nic_.slow_gb_per_s;
    }
    return queues;
  }

  /// In host memory, written by one side each.
  struct Words {
    std::uint64_t stop;
    alignas(64) std::uint64_t serving;
  };

  std::shared_ptr<Backend> executor_;
  bool on_gpu_;
  SimulatedNic nic_;
  std::vector<device::rdma::Region> regions_;  ///< see mapped_regions()
  std::shared_ptr<std::uint64_t> doorbells_;
  std::shared_ptr<SimulatedQueue> queues_;
  std::shared_ptr<device::rdma::Region> device_regions_;
  int blocks_, threads_ = 0;
  std::shared_ptr<device::simulated::Lending> lending_;
  SimulatedNicParams params_;
  std::optional<Ringer> ringer_;  ///< handler `doorbell`
  std::shared_ptr<Words> words_;
  OwnStream stream_;
  std::deque<EventHandle> launches_;  ///< that are enqueued: their ends
  std::string why_gone_;              ///< written before gone_
  std::atomic<bool> gone_ = false;
  std::jthread launching_;
};

}  // namespace

std::unique_ptr<Ends> make_simulated_ends(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap,
                                          const ConnectionOptions& options, const SimulatedNic& nic,
                                          NicHandler handler) {
  return std::make_unique<SimulatedEnds>(executor, heap, options, nic, handler);
}

}  // namespace deep_ep::rdma
