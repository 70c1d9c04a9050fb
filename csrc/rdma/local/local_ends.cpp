#include "csrc/rdma/local/local_ends.hpp"

#include <optional>
#include <utility>

#include "csrc/executor/backend.hpp"
#include "csrc/rdma/local/local_wire.hpp"
#include "csrc/rdma/ring/cpu_handler.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::uint32_t kSinkKey = 1;  // below those of heaps

/// The key by which ranks on one host know rank r's heap; never 0, which is no key.
constexpr std::uint32_t local_key_of_rank(int rank) { return 0x10000u + static_cast<std::uint32_t>(rank); }

/// A kernel that waits for a peer needs this wire's thread, which calls CUDA. While CUDA loads another kernel for the
/// first time it blocks every other call and waits for the running kernel: neither goes on before the deadline. The
/// library's kernels are loaded by then; those of others may not be.
void warn_of_lazy_loading() {
  if (environment::of_process("CUDA_MODULE_LOADING") == "EAGER") return;
  log::warn(
      "wire 'local' on GPUs: a kernel of another library that is loaded while a low-latency call waits stops both "
      "until "
      "the deadline; set CUDA_MODULE_LOADING=EAGER");
}

class LocalEnds final : public Ends {
 public:
  LocalEnds(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap, const ConnectionOptions& options,
            const WrapWire& wrap)
      : Ends(options, "wire local") {
    rings_.emplace(executor, options.rings());
    const bool cuda = executor->device().kind == Device::Kind::cuda;
    if (cuda) {
      backend_of(executor)->load_kernels();
      warn_of_lazy_loading();
    }
    auto wire = std::make_unique<LocalWire>(cuda ? executor : nullptr);
    wire->add_memory(kSinkKey, rings_->sinks(), rings_->sink_bytes());
    wire->add_memory(local_key_of_rank(options.rank), heap.local(), heap.bytes());
    for (const int peer : options.peers) {
      wire->add_memory(local_key_of_rank(peer), mapped_heap(heap, options.rank, peer, "local"), heap.bytes());
    }
    wire_ = wrap ? wrap(std::move(wire)) : std::move(wire);
    handler_.emplace(*wire_, device_);
  }

  QueuePairAddress address(std::size_t end) const override {
    const std::uint32_t key = local_key_of_rank(options_.rank);
    return {.queue_pair = static_cast<std::uint32_t>(1 + end), .heap_key = key, .signal_key = key};
  }

  RdmaPeerParams connect(std::size_t end, const QueuePairAddress& peer) override {
    const auto queue = rings_->queue_pair(end, address(end).queue_pair, options_.peer(end), {0, kSinkKey});
    handler_->add(queue);
    return {queue, local_key_of_rank(options_.rank), peer.heap_key, peer.signal_key};
  }

  void start() override { handler_->start({}, /*for_device=*/false); }

  std::string describe() const override { return "handler cpu, wire local"; }

 private:
  std::optional<Failure> executor_failure() const override { return handler_->failure(); }

  std::unique_ptr<Wire> wire_;
  std::optional<CpuHandler> handler_;  ///< last: its thread uses the rest
};

}  // namespace

std::byte* mapped_heap(const SymmetricHeap& heap, int rank, int peer, std::string_view wire) {
  std::byte* const mapped = heap.peers()[static_cast<std::size_t>(peer)];
  if (mapped != nullptr) return mapped;
  fail<SystemError>("rank {} reaches rank {} over the wire '{}', but has not mapped its heap: they are not on one host",
                    rank, peer, wire);
}

std::unique_ptr<Ends> make_local_ends(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap,
                                      const ConnectionOptions& options, const WrapWire& wrap) {
  return std::make_unique<LocalEnds>(executor, heap, options, wrap);
}

}  // namespace deep_ep::rdma
