#include <utility>

#include "csrc/rdma/ring/gpu_nic_handler.hpp"
#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"
#include "csrc/rdma/verbs/devx/gpu_ring_memory.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma::verbs {
namespace {

using devx::DevxQueuePair;
using devx::QueuePairLayout;

/// A register that kernels ring, mapped as long as this lives.
class MappedDoorbell {
 public:
  MappedDoorbell(std::shared_ptr<DoorbellPages> pages, void* reg)
      : pages_(std::move(pages)), register_(reg), mapped_(pages_->map(reg)) {}
  ~MappedDoorbell() { pages_->unmap(register_); }
  MappedDoorbell(const MappedDoorbell&) = delete;
  MappedDoorbell& operator=(const MappedDoorbell&) = delete;
  std::uint64_t* get() const { return mapped_; }

 private:
  std::shared_ptr<DoorbellPages> pages_;
  void* register_;
  std::uint64_t* mapped_;
};

void require_possible(const NicAccess& nic, const Mlx5Functions& functions, DoorbellPages& pages) {
  const devx::DoorbellPage trial(devx::Context{nic.device, &functions});
  const std::string why = why_kernels_cannot_ring(pages, trial.register_address());
  if (!why.empty()) throw SystemError(why);
}

class GpuEnds final : public NicEnds {
 public:
  GpuEnds(const NicAccess& nic, const std::shared_ptr<Executor>& executor, const NicEndsOptions& options)
      : name_(nic.name),
        peers_(options.peers),
        batch_(options.batch),
        layout_(QueuePairLayout::of(options.depth)),
        pages_(std::make_shared<DoorbellPages>(nic.make_registrar())) {
    const Mlx5Functions& functions = nic.mlx5_functions();
    require_possible(nic, functions, *pages_);
    try {
      make_pairs(nic, functions, executor, nic.gpu_memory);
    } catch (const SystemError& error) {
      if (!nic.gpu_memory) throw;
      log::info("rdma: {}: rings lie in host memory, because: {}", name_, error.what());
      doorbells_.clear();
      pairs_.clear();
      memory_.reset();
      make_pairs(nic, functions, executor, false);
    }
  }

  const QueuePairAddress& address(std::size_t i) const override { return pairs_[i]->address(); }
  void connect(std::size_t i, const QueuePairAddress& peer) override { pairs_[i]->connect(peer); }

  void start() override {
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      handler_.add({.number = pairs_[i]->number(),
                    .depth = layout_.depth,
                    .completion = memory_->on_gpu() ? nullptr : completion(i),
                    .peer = peers_[i],
                    .device = name_});
    }
  }

  RdmaQueuePair queue(std::size_t i) const override {
    RdmaQueuePair pair;
    pair.ring = reinterpret_cast<device::rdma::WorkQueueEntry*>(memory_->ring(i) + layout_.ring);
    pair.completion = completion(i);
    pair.doorbell = doorbells_[i]->get();
    pair.doorbell_record = reinterpret_cast<std::uint32_t*>(memory_->ring(i) + layout_.send_doorbell_record());
    pair.state = memory_->state(i);
    pair.kind = RdmaDoorbell::device_register;
    pair.number = pairs_[i]->number();
    pair.depth = layout_.depth;
    pair.batch = batch_;
    // In the GPU's own memory all that the device reads is served by this GPU, see SendQueue.
    pair.system_scope = !memory_->on_gpu();
    pair.peer = peers_[i];
    return pair;
  }

  std::optional<Failure> failure() const override { return handler_.failure(); }
  bool idle() const override { return memory_->idle(); }
  std::string describe() const override {
    return fmt::format("handler gpu, rings in {}",
                       pairs_.empty() ? "no memory" : to_string(pairs_.front()->memory_path()));
  }

 private:
  void make_pairs(const NicAccess& nic, const Mlx5Functions& functions, const std::shared_ptr<Executor>& executor,
                  bool on_gpu) {
    memory_ = std::make_unique<GpuRingMemory>(executor, layout_, peers_.size(), on_gpu);
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      const devx::DevxQueuePairOptions options{.layout = layout_,
                                               .memory = memory_->ring(i),
                                               .gpu_memory = on_gpu,
                                               .exporter = nic.exporter,
                                               .user_index = static_cast<std::uint32_t>(i)};
      pairs_.push_back(std::make_unique<DevxQueuePair>(nic.device, functions, options, nic.path));
      doorbells_.push_back(std::make_unique<MappedDoorbell>(pages_, pairs_.back()->doorbell().register_address()));
    }
  }

  device::rdma::CompletionEntry* completion(std::size_t i) const {
    return reinterpret_cast<device::rdma::CompletionEntry*>(memory_->ring(i) + layout_.completion);
  }

  // In this order; they end in the opposite one: doorbells before the pages' registers, queue pairs before the memory.
  std::string name_;
  std::vector<int> peers_;
  std::uint32_t batch_;
  QueuePairLayout layout_;
  std::shared_ptr<DoorbellPages> pages_;
  std::unique_ptr<GpuRingMemory> memory_;
  std::vector<std::unique_ptr<DevxQueuePair>> pairs_;
  std::vector<std::unique_ptr<MappedDoorbell>> doorbells_;
  GpuNicHandler handler_;
};

}  // namespace

std::unique_ptr<NicEnds> make_gpu_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                       const NicEndsOptions& options) {
  if (!nic.gpu_memory) throw SystemError("this rank's kernels run on the CPU");
  if (!nic.mlx5) {
    fail<SystemError>("NIC {} is none of NVIDIA's ConnectX or BlueField: its rings have another format", nic.name);
  }
  return std::make_unique<GpuEnds>(nic, executor, options);
}

}  // namespace deep_ep::rdma::verbs
