#include <optional>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/ringer.hpp"
#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma::verbs {
namespace {

using devx::DevxQueuePair;

class DevxEnds final : public NicEnds {
 public:
  DevxEnds(NicHandler handler, const NicAccess& nic, const std::shared_ptr<Executor>& executor,
           const ConnectionOptions& options)
      : NicEnds(nic, options) {
    if (handler == NicHandler::gpu) {
      register_ = nic.devx->map_doorbell(nic.gpu->map_page);  // before anything else is made: kernels must reach it
    } else {
      ringer_.emplace();
    }
    try {
      make(executor, /*on_gpu=*/true);
    } catch (const Error& error) {
      log::warn("rdma: {}: rings lie in host memory, which makes every message slower, because: {}", device_,
                error.what());
      make(executor, /*on_gpu=*/false);
    }
  }

  QueuePairAddress address(std::size_t end) const override { return pairs_[end].address(); }

  RdmaQueuePair connect(std::size_t end, const QueuePairAddress& peer) override {
    pairs_[end].connect(peer);
    RdmaQueuePair queue = params_of(end, pairs_[end].number(), nic_.device->local_key(), peer);
    if (ringer_) {
      ringer_->add(queue, rings_->doorbell_record(end), static_cast<std::uint64_t*>(nic_.devx->doorbell->reg_addr));
    } else {
      queue.doorbell = register_;
      queue.doorbell_record = rings_->doorbell_record(end);
    }
    // In the GPU's own memory all that the device reads is served by this GPU, see PortChannel.
    queue.system_scope = !rings_->options().on_gpu;
    return queue;
  }

  NicHandler handler() const override { return ringer_ ? NicHandler::doorbell : NicHandler::gpu; }
  void start() override {
    if (ringer_) ringer_->start(nic_.nic.nic.cpus);  // else the device serves the rings by itself
  }

  std::string health() const override {
    Device& device = *nic_.device;
    std::string of_rings = Ends::health();
    if (device.has_failed() || device.port().state == IBV_PORT_ACTIVE) return of_rings;
    const char* const state = device.functions().port_state_str(device.port().state);
    return fmt::format("port {} is {}; {}", device.path().port, state, of_rings);
  }

  std::string describe() const override {
    return fmt::format("handler {}, rings in {}, NIC {}, heap registered as {}", name_of(handler()),
                       pairs_.front().memory_path(), device_, nic_.device->heap_path());
  }

 private:
  std::string executor_failure() const override {
    if (!nic_.device->has_failed()) return {};
    return fmt::format("RDMA device {} reported a fatal error: nothing on it completes any more", device_);
  }

  /// Asks the device.
  std::string trouble(std::size_t end, const RingStatus& ring) const override {
    const std::string found = pairs_[end].trouble(ring.state.posted, ring.outstanding());
    if (found.empty()) return {};
    return fmt::format("queue pair {:#x} to rank {}: {}", pairs_[end].number(), options_.peer(end), found);
  }

  void make(const std::shared_ptr<Executor>& executor, bool on_gpu) {
    pairs_.clear();
    rings_.emplace(
        executor,
        options_.rings({.on_gpu = on_gpu, .alignment = devx::kRingAlignment, .records_apart = ringer_.has_value()}));
    const devx::Umem umem = nic_.devx->add_memory({.address = rings_->ring(0),
                                                   .bytes = rings_->options().bytes() * options_.ends(),
                                                   .gpu = on_gpu ? &nic_.gpu->export_dma_buf : nullptr});
    // Records that a thread writes lie in memory of their own.
    const devx::Umem records = ringer_ ? nic_.devx->add_memory({rings_->records(), rings_->record_bytes()}) : umem;
    for (std::size_t i = 0; i < options_.ends(); ++i) {
      pairs_.emplace_back(nic_.devx, *rings_, i, umem, records, options_.port_offset(i));
    }
  }

  std::uint64_t* register_ = nullptr;  ///< handler `gpu`: as kernels ring it
  std::vector<DevxQueuePair> pairs_;
  std::optional<Ringer> ringer_;  ///< handler `doorbell`. Last: its thread uses the rest
};

}  // namespace

std::unique_ptr<Ends> make_devx_ends(NicHandler handler, NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                     const ConnectionOptions& options) {
  if (!nic.gpu) throw SystemError("this rank's kernels run on the CPU");
  if (nic.nic.nic.capability != Capability::mlx5) {
    fail<SystemError>("NIC {} is not one of NVIDIA's ConnectX or BlueField: its rings have another format",
                      nic.nic.name());
  }
  if (nic.devx == nullptr) {
    nic.devx =
        std::make_shared<devx::DevxDevice>(nic.device, nic.mlx5 ? *nic.mlx5 : mlx5_functions(), nic.gpu->page_bytes);
  }
  return std::make_unique<DevxEnds>(handler, nic, executor, options);
}

}  // namespace deep_ep::rdma::verbs
