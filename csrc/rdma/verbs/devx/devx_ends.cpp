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
        handler_(handler),
        name_(nic.nic.name()),
        device_(std::make_shared<devx::DevxDevice>(nic.heap.device, nic.mlx5_functions(), nic.page_mapper.page_bytes)),
        pages_(nic.page_mapper) {
    if (handler_ == NicHandler::gpu) {
      // Whether kernels can ring is tried on a register of its own, before anything else is made.
      const auto trial = devx::make_doorbell(*device_);
      DoorbellPages(nic.page_mapper).map(trial->reg_addr);
    } else {
      bells_.emplace(executor, options_.ends(), options_.depth);
    }
    try {
      make(executor, nic.gpu_memory);
    } catch (const Error& error) {
      if (!nic.gpu_memory) throw;
      log::warn("rdma: {}: rings lie in host memory, which makes every message slower, because: {}", name_,
                error.what());
      make(executor, false);
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
      queue.doorbell = pages_.map(pairs_[end].doorbell());
      queue.doorbell_record = rings_->doorbell_record(end);
    }
    // In the GPU's own memory all that the device reads is served by this GPU, see PortChannel.
    queue.system_scope = !rings_->options().on_gpu;
    return params_of(end, queue, peer);
  }

  NicHandler handler() const override { return handler_; }
  void start() override {
    if (bells_) ringer_ = bells_->thread(nic_.nic.nic.cpus);  // else the device serves the rings by itself
  }

  /// Completions in GPU memory are watched by the kernels alone, which put failures on record (FaultKind::rdma_failed).
  std::optional<Failure> failure() const override {
    if (nic_.heap.device->has_failed()) {
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
    constexpr std::size_t kMost = 4;
    const std::size_t more = troubles.size() > kMost ? troubles.size() - kMost : 0;
    if (troubles.empty()) return "all that was posted has arrived";
    if (more != 0) troubles.resize(kMost);
    return fmt::format("{}{}", fmt::join(troubles, "; "), more != 0 ? fmt::format("; and {} more", more) : "");
  }

  bool idle() const override { return rings_->idle(); }

  std::string describe() const override {
    return fmt::format("handler {}, rings in {}, NIC {}, heap registered as {}", name_of(handler_),
                       to_string(pairs_.front().memory_path()), name_, to_string(nic_.heap.signals.path()));
  }

 private:
  Failure failure_of(std::size_t end, const device::rdma::CompletionEntry& completion, std::uint32_t tail) const {
    // The device reports the lowest 16 bits of the index.
    return {.peer = options_.peer(end),
            .device = name_,
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
    pages_.unmap();
    pairs_.clear();
    make_rings(executor, {.on_gpu = on_gpu, .alignment = devx::kRingAlignment});
    const std::size_t bytes = rings_->layout().bytes;
    devx::QueueMemory place{.umem = {*device_,
                                     {.address = rings_->ring(0),
                                      .bytes = bytes * options_.ends(),
                                      .gpu = on_gpu ? &nic_.exporter : nullptr}},
                            .layout = rings_->layout()};
    if (bells_) {
      const MemoryRange records{.address = bells_->records(), .bytes = bells_->record_bytes()};
      place.records.emplace(*device_, records);
    }
    for (std::size_t i = 0; i < options_.ends(); ++i) {
      place.offset = i * bytes;
      place.record = i * 2 * sizeof(std::uint32_t);
      pairs_.emplace_back(device_, place, options_.port_offset(i));
      if (!bells_) pages_.map(pairs_.back().doorbell());
    }
  }

  // In this order; they are destroyed in the opposite order: mapped registers before the queue pairs that have them.
  NicHandler handler_;
  std::string name_;
  std::shared_ptr<devx::DevxDevice> device_;
  std::optional<Bells> bells_;  ///< handler `doorbell`
  std::vector<DevxQueuePair> pairs_;
  DoorbellPages pages_;
  std::jthread ringer_;  ///< last: rings for bells
};

}  // namespace

std::unique_ptr<Ends> make_devx_ends(NicHandler handler, const NicAccess& nic,
                                     const std::shared_ptr<Executor>& executor, const ConnectionOptions& options) {
  if (!nic.gpu_memory) throw SystemError("this rank's kernels run on the CPU");
  if (nic.nic.nic.capability != Capability::mlx5) {
    fail<SystemError>("NIC {} is not one of NVIDIA's ConnectX or BlueField: its rings have another format",
                      nic.nic.name());
  }
  return std::make_unique<DevxEnds>(handler, nic, executor, options);
}

}  // namespace deep_ep::rdma::verbs
