#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/bells.hpp"
#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma::verbs {
namespace {

using devx::DevxQueuePair;

class DevxEnds final : public NicEnds {
 public:
  DevxEnds(NicHandler handler, const NicAccess& nic, const std::shared_ptr<Executor>& executor,
           const ConnectionOptions& options)
      : NicEnds(nic, options),
        device_(
            std::make_shared<devx::DevxDevice>(nic.heap.device, nic.mlx5_functions(), nic.gpu->doorbells->page_bytes)) {
    if (handler == NicHandler::gpu) {
      // Whether kernels can ring is tried on a register of its own, before anything else is made.
      const auto trial = devx::make_doorbell(*device_);
      nic.gpu->doorbells->map(trial->reg_addr);
    } else {
      bells_.emplace(executor, options_.ends(), options_.depth);
    }
    try {
      make(executor, /*on_gpu=*/true);
    } catch (const Error& error) {
      log::warn("rdma: {}: rings lie in host memory, which makes every message slower, because: {}", nic_.nic.name(),
                error.what());
      make(executor, /*on_gpu=*/false);
    }
  }

  QueuePairAddress address(std::size_t end) const override { return nic_.heap.at(pairs_[end].address()); }

  RdmaPeerParams connect(std::size_t end, const QueuePairAddress& peer) override {
    pairs_[end].connect(peer);
    RdmaQueuePair queue = rings_->queue_pair(end, pairs_[end].number(), options_.peer(end));
    if (bells_) {
      bells_->connect(end, queue, static_cast<std::uint64_t*>(pairs_[end].doorbell()));
    } else {
      queue.kind = RdmaDoorbell::device_register;
      queue.doorbell = registers_[end].get();
      queue.doorbell_record = rings_->doorbell_record(end);
    }
    // In the GPU's own memory all that the device reads is served by this GPU, see PortChannel.
    queue.system_scope = !rings_->options().on_gpu;
    return params_of(end, queue, peer);
  }

  NicHandler handler() const override { return bells_ ? NicHandler::doorbell : NicHandler::gpu; }
  void start() override {
    if (bells_) ringer_ = bells_->thread(nic_.nic.nic.cpus);  // else the device serves the rings by itself
  }

  /// Completions in GPU memory are watched by the kernels alone, which put failures on record (FaultKind::rdma_failed).
  std::optional<Failure> failure() const override {
    if (nic_.heap.device->has_failed()) {
      return Failure{.of_device = true,
                     .device = nic_.nic.name(),
                     .detail = "reported a fatal error: nothing on it completes any more"};
    }
    if (bells_ && bells_->lost()) {
      return Failure{.of_device = true, .device = nic_.nic.name(), .detail = "was not told of a doorbell"};
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
    if (nic_.heap.device->has_failed()) return rdma::describe(*failure());
    std::vector<std::string> troubles;
    const ibv_port_attr port = nic_.heap.device->port();
    if (port.state != IBV_PORT_ACTIVE) {
      const char* const state = nic_.heap.device->functions().port_state_str(port.state);
      troubles.push_back(fmt::format("port {} is {}", nic_.heap.device->path().port, state));
    }
    const std::vector<RingStatus> rings = rings_->status();
    for (std::size_t end = 0; end < pairs_.size(); ++end) {
      std::string trouble = trouble_of(end, rings[end]);
      if (!trouble.empty()) troubles.push_back(std::move(trouble));
    }
    if (troubles.empty()) return "all that was posted has arrived";
    constexpr std::size_t kMost = 4;
    if (const std::size_t all = troubles.size(); all > kMost) {
      troubles.resize(kMost);
      troubles.push_back(fmt::format("and {} more", all - kMost));
    }
    return fmt::format("{}", fmt::join(troubles, "; "));
  }

  std::string describe() const override {
    return fmt::format("handler {}, rings in {}, NIC {}, heap registered as {}", name_of(handler()),
                       pairs_.front().memory_path(), nic_.nic.name(), nic_.heap.signals.path());
  }

 private:
  Failure failure_of(std::size_t end, const device::rdma::CompletionEntry& completion, std::uint32_t tail) const {
    // The device reports the lowest 16 bits of the index.
    return {.peer = options_.peer(end),
            .device = nic_.nic.name(),
            .queue_pair = pairs_[end].number(),
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
    const std::string trouble = pairs_[end].trouble(ring.state.posted, ring.outstanding());
    if (trouble.empty()) return {};
    return fmt::format("queue pair {:#x} to rank {}: {}", pairs_[end].number(), options_.peer(end), trouble);
  }

  void make(const std::shared_ptr<Executor>& executor, bool on_gpu) {
    registers_.clear();
    pairs_.clear();
    make_rings(executor, {.on_gpu = on_gpu, .alignment = devx::kRingAlignment});
    const RingLayout& layout = rings_->layout();
    const devx::Umem umem(*device_, {.address = rings_->ring(0),
                                     .bytes = layout.bytes * options_.ends(),
                                     .gpu = on_gpu ? &nic_.gpu->export_dma_buf : nullptr});
    // Records that bells ring lie in memory of their own.
    const devx::Umem records = bells_ ? devx::Umem(*device_, {bells_->records(), bells_->record_bytes()}) : umem;
    for (std::size_t i = 0; i < options_.ends(); ++i) {
      const std::size_t offset = i * layout.bytes;
      const std::size_t record = bells_ ? i * 2 * sizeof(std::uint32_t) : offset + layout.doorbell;
      pairs_.emplace_back(device_, devx::QueueMemory{umem, offset, layout, records, record}, options_.port_offset(i));
      if (!bells_) registers_.push_back(nic_.gpu->doorbells->map(pairs_.back().doorbell()));
    }
  }

  // In this order; they are destroyed in the opposite order: mapped registers before the queue pairs that have them.
  std::shared_ptr<devx::DevxDevice> device_;
  std::optional<Bells> bells_;  ///< handler `doorbell`
  std::vector<DevxQueuePair> pairs_;
  std::vector<std::shared_ptr<std::uint64_t>> registers_;  ///< handler `gpu`: those of the pairs, as kernels ring them
  std::jthread ringer_;                                    ///< last: rings for bells
};

}  // namespace

std::unique_ptr<Ends> make_devx_ends(NicHandler handler, const NicAccess& nic,
                                     const std::shared_ptr<Executor>& executor, const ConnectionOptions& options) {
  if (!nic.gpu) throw SystemError("this rank's kernels run on the CPU");
  if (nic.nic.nic.capability != Capability::mlx5) {
    fail<SystemError>("NIC {} is not one of NVIDIA's ConnectX or BlueField: its rings have another format",
                      nic.nic.name());
  }
  return std::make_unique<DevxEnds>(handler, nic, executor, options);
}

}  // namespace deep_ep::rdma::verbs
