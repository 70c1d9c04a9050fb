#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/bells.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/rdma/verbs/nic_rails.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma::verbs {
namespace {

using devx::DevxQueuePair;

/// Whether kernels can ring is tried on a page of its own, before anything else is made.
void try_ringing(const NicAccess& nic, DoorbellPages& pages) {
  const devx::DoorbellPage trial(devx::Context{nic.device, &nic.mlx5_functions()});
  pages.map(trial.register_address());
}

class DevxEnds final : public Ends {
 public:
  DevxEnds(NicHandler handler, const NicAccess& nic, const std::shared_ptr<Executor>& executor, HeapRegistration heap,
           const ConnectionOptions& options)
      : handler_(handler),
        name_(nic.nic.name()),
        cpus_(nic.nic.nic.cpus),
        options_(options),
        heap_(std::move(heap)),
        landings_(nic.landing_nics.get(), nic.rank, options),
        pages_(nic.page_mapper),
        device_(nic.device),
        port_(nic.path.port) {
    if (handler_ == NicHandler::gpu) {
      try_ringing(nic, pages_);
    } else {
      bells_.emplace(executor, options_.ends(), options_.depth);
    }
    try {
      make(nic, executor, nic.gpu_memory);
    } catch (const Error& error) {
      if (!nic.gpu_memory) throw;
      log::warn("rdma: {}: rings lie in host memory, which makes every message slower, because: {}", name_,
                error.what());
      make(nic, executor, false);
    }
    sinks_ = std::make_unique<Registration>(register_sinks(nic, *rings_));
  }

  QueuePairAddress address(std::size_t end) const override { return heap_.at(pairs_[end]->address()); }

  RdmaPeerParams connect(std::size_t end, const QueuePairAddress& peer) override {
    pairs_[end]->connect(peer);
    RdmaQueuePair queue = rings_->queue_pair(end, pairs_[end]->number(), options_.peer(end));
    if (bells_) {
      bells_->connect(end, queue);
    } else {
      queue.kind = RdmaDoorbell::device_register;
      queue.doorbell = doorbells_[end].get();
      queue.doorbell_record = rings_->doorbell_record(end);
    }
    // In the GPU's own memory all that the device reads is served by this GPU, see PortChannel.
    queue.system_scope = !rings_->options().on_gpu;
    return peer_params(queue, heap_, peer, *sinks_, end);
  }

  QueuePairAddress landing(std::size_t end) const override { return landings_.address(end); }
  void connect_landing(std::size_t end, const QueuePairAddress& peer) override { landings_.connect(end, peer); }
  NicHandler handler() const override { return handler_; }
  void start() override {
    if (!bells_) return;  // the device serves the rings by itself
    std::vector<Bells::Register> registers;
    for (const auto& pair : pairs_) {
      registers.push_back({static_cast<std::uint64_t*>(pair->doorbell().register_address()), pair->number()});
    }
    bells_->start(std::move(registers));
    ringer_ = bells_->thread(cpus_);
  }

  /// Completions in GPU memory are watched by the kernels alone, which put failures on record (FaultKind::rdma_failed).
  std::optional<Failure> failure() const override {
    if (device_->has_failed()) {
      return Failure{
          .of_device = true, .device = name_, .detail = "reported a fatal error: nothing on it completes any more"};
    }
    if (bells_ && bells_->lost()) {
      return Failure{.of_device = true, .device = name_, .detail = "was not told of a doorbell"};
    }
    for (std::size_t end = 0; end < pairs_.size() && !rings_->options().on_gpu; ++end) {
      const device::rdma::CompletionEntry& completion = *rings_->completion(end);
      const std::uint32_t tail = __atomic_load_n(&completion.tail, __ATOMIC_ACQUIRE);
      if (device::rdma::tail_opcode(tail) == device::rdma::kCompletionError) return failure_of(end, completion, tail);
    }
    return std::nullopt;
  }

  /// Asks the device about every queue pair.
  std::string health() const override {
    if (device_->has_failed()) return rdma::describe(*failure());
    std::vector<std::string> troubles;
    if (const ibv_port_attr port = device_->port(port_); port.state != IBV_PORT_ACTIVE) {
      troubles.push_back(fmt::format("port {} is {}", port_, device_->functions().port_state_str(port.state)));
    }
    const std::vector<RingStatus> rings = rings_->status();
    for (std::size_t end = 0; end < pairs_.size(); ++end) {
      std::string trouble = trouble_of(end, rings[end]);
      if (!trouble.empty()) troubles.push_back(std::move(trouble));
    }
    constexpr std::size_t kMost = 4;
    const std::size_t more = troubles.size() > kMost ? troubles.size() - kMost : 0;
    if (troubles.empty()) return "all that was posted has arrived";
    if (more != 0) troubles.resize(kMost);
    return fmt::format("{}{}", fmt::join(troubles, "; "), more != 0 ? fmt::format("; and {} more", more) : "");
  }

  bool idle() const override { return rings_->idle(); }

  std::string describe() const override {
    return fmt::format("handler {}, rings in {}, NIC {}, heap registered as {}", name_of(handler_),
                       to_string(pairs_.front()->memory_path()), name_, to_string(heap_.signals.path()));
  }

 private:
  Failure failure_of(std::size_t end, const device::rdma::CompletionEntry& completion, std::uint32_t tail) const {
    // The device reports the lowest 16 bits of the index.
    return {.peer = options_.peer(end),
            .device = name_,
            .queue_pair = pairs_[end]->number(),
            .index = device::rdma::tail_counter(tail),
            .opcode = device::rdma::swap32(completion.opcode_number) >> 24,
            .syndrome = static_cast<Syndrome>(completion.syndrome),
            .vendor_syndrome = completion.vendor_syndrome};
  }

  /// Empty where all that was posted is complete.
  std::string trouble_of(std::size_t end, const RingStatus& ring) const {
    if (device::rdma::tail_opcode(ring.completion.tail) == device::rdma::kCompletionError) {
      return rdma::describe(failure_of(end, ring.completion, ring.completion.tail));
    }
    const std::string name = fmt::format("queue pair {:#x} to rank {}", pairs_[end]->number(), options_.peer(end));
    const devx::QueuePairProgress progress = pairs_[end]->progress();
    if (progress.state != devx::kReadyToSend) {
      return fmt::format("{} is in the state '{}'", name, devx::state_name(progress.state));
    }
    if (ring.outstanding() == 0) return {};
    const auto unseen = static_cast<std::uint16_t>(ring.state.posted - progress.posted);
    const auto unfetched = static_cast<std::uint16_t>(progress.posted - progress.fetched);
    return fmt::format("{}: of {} entries under way the device was not told of {} and has not fetched {}", name,
                       ring.outstanding(), unseen, unfetched);
  }

  void make(const NicAccess& nic, const std::shared_ptr<Executor>& executor, bool on_gpu) {
    doorbells_.clear();
    pairs_.clear();
    rings_.reset();
    rings_ = std::make_unique<RingMemory>(executor, RingOptions{.count = options_.ends(),
                                                                .depth = options_.depth,
                                                                .batch = options_.batch,
                                                                .on_gpu = on_gpu,
                                                                .alignment = devx::kRingAlignment});
    const auto device = std::make_shared<devx::DevxDevice>(nic.device, nic.mlx5_functions(), nic.path, nic.page_bytes);
    const std::size_t bytes = rings_->layout().bytes;
    const MemoryRange range{.address = rings_->ring(0), .bytes = bytes * options_.ends()};
    const auto memory =
        std::make_shared<const devx::Umem>(on_gpu ? devx::Umem::of_gpu_memory(device->context(), range, nic.exporter)
                                                  : devx::Umem::of_host_memory(device->context(), range));
    devx::QueueMemory place{.umem = memory, .layout = rings_->layout()};
    if (bells_) {
      place.records = std::make_shared<const devx::Umem>(devx::Umem::of_host_memory(
          device->context(), {.address = bells_->records(), .bytes = bells_->record_bytes()}));
    }
    for (std::size_t i = 0; i < options_.ends(); ++i) {
      place.offset = i * bytes;
      place.record = i * 2 * sizeof(std::uint32_t);
      pairs_.push_back(std::make_unique<DevxQueuePair>(device, place, options_.port_offset(i)));
      if (!bells_) doorbells_.push_back(pages_.map(pairs_.back()->doorbell().register_address()));
    }
  }

  // In this order; they are destroyed in the opposite order: mapped registers before the pages and the queue pairs that
  // have them, queue pairs before the memory.
  NicHandler handler_;
  std::string name_;
  std::vector<int> cpus_;
  ConnectionOptions options_;
  HeapRegistration heap_;
  std::optional<Bells> bells_;  ///< handler `doorbell`
  std::unique_ptr<RingMemory> rings_;
  std::unique_ptr<Registration> sinks_;
  Landings landings_;
  DoorbellPages pages_;
  std::vector<std::unique_ptr<DevxQueuePair>> pairs_;
  std::vector<MappedDoorbell> doorbells_;
  std::shared_ptr<Device> device_;
  int port_;
  std::jthread ringer_;  ///< last: rings for bells
};

}  // namespace

std::unique_ptr<Ends> make_devx_ends(NicHandler handler, const NicAccess& nic,
                                     const std::shared_ptr<Executor>& executor, HeapRegistration heap,
                                     const ConnectionOptions& options) {
  if (!nic.gpu_memory) throw SystemError("this rank's kernels run on the CPU");
  if (!nic.mlx5()) {
    fail<SystemError>("NIC {} is not one of NVIDIA's ConnectX or BlueField: its rings have another format",
                      nic.nic.name());
  }
  return std::make_unique<DevxEnds>(handler, nic, executor, std::move(heap), options);
}

}  // namespace deep_ep::rdma::verbs
