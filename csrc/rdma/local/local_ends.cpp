#include "csrc/rdma/local/local_ends.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/executor/backend.hpp"
#include "csrc/executor/own_stream.hpp"
#include "csrc/memory/executor_memory.hpp"
#include "csrc/rdma/ring/cpu_handler.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::rdma {
namespace {

using device::rdma::Region;

/// Its own wire: checks what a device checks, and executes operations in post(), in its order.
///
/// On the CPU heaps are ordinary memory of this process, and additions are atomic among all processes. On GPUs copies
/// of the executor reach them, and host memory that it pinned, on a stream of their own: an addition reads the word,
/// adds on the host and writes it back, so only one wire may add to a word (every signal of this library has one
/// producer).
class LocalEnds final : public Ends, private Wire {
 public:
  LocalEnds(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap, const ConnectionOptions& options,
            const LocalTrial& trial)
      : Ends(options, "wire local"), failed_(options.ends()) {
    rings_.emplace(executor, options.rings());
    const bool cuda = executor->device().kind == Device::Kind::cuda;
    // A kernel that waits for a peer needs this wire's thread, which calls CUDA. While CUDA loads another kernel for
    // the first time it blocks every other call and waits for the running kernel: neither goes on before the deadline.
    if (cuda) backend_of(executor)->load_kernels();
    if (cuda && environment::of_process("CUDA_MODULE_LOADING") != "EAGER") {
      log::warn(
          "wire 'local' on GPUs: a kernel of another library that is loaded while a low-latency call waits stops both "
          "until the deadline; set CUDA_MODULE_LOADING=EAGER");
    }
    if (cuda || trial.by_executor) {
      executor_ = executor;
      stream_.emplace(*executor);
      bounce_ = pinned_memory<std::uint64_t>(executor);
    }
    regions_ = mapped_regions(heap, options, "local");
    if (trial.wrap) wrapped_ = trial.wrap(*this);
    handler_.emplace(wrapped_ != nullptr ? *wrapped_ : *this, device_);
  }

  QueuePairAddress address(std::size_t end) const override {
    const std::uint32_t key = heap_key(options_.rank);
    return {.queue_pair = static_cast<std::uint32_t>(1 + end), .heap_key = key, .signal_key = key};
  }

  RdmaQueuePair connect(std::size_t end, const QueuePairAddress& peer) override {
    const RdmaQueuePair queue = params_of(end, address(end).queue_pair, heap_key(options_.rank), peer);
    handler_->add(queue);
    return queue;
  }

  void start() override { handler_->start({}, /*for_device=*/false); }

  std::string describe() const override { return "handler cpu, wire local"; }

 private:
  std::string executor_failure() const override { return handler_->failure(); }

  void post(std::size_t ring, std::span<const Operation> operations) override {
    for (const Operation& operation : operations) {
      if (failed_[ring]) continue;
      const Syndrome syndrome = execute(operation);
      failed_[ring] = syndrome != Syndrome::none;
      if (failed_[ring] || operation.signalled) completions_.push_back({ring, operation.index, syndrome, 0});
    }
  }

  std::size_t poll(std::span<WireCompletion> completions) override {
    const std::size_t count = std::min(completions.size(), completions_.size());
    if (count != 0 && std::exchange(copying_, false)) executor_->synchronize(stream_->get());
    std::copy_n(completions_.begin(), count, completions.begin());
    completions_.erase(completions_.begin(), completions_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }

  Syndrome execute(const Operation& operation) {
    std::byte* const local = find(operation.local, operation.length);
    std::byte* const remote = find(operation.remote, operation.length);
    const Syndrome syndrome = device::rdma::answer(operation, local, remote);
    if (syndrome != Syndrome::none || operation.length == 0) return syndrome;
    if (operation.opcode == device::rdma::kOpcodeFetchAdd) {
      fetch_add(remote, operation.add);
    } else if (executor_ == nullptr) {
      std::memcpy(remote, local, operation.length);
    } else {
      executor_->copy(remote, local, operation.length, stream_->get());
      copying_ = true;
    }
    return syndrome;
  }

  std::byte* find(const device::rdma::KeyedAddress& place, std::uint64_t bytes) const {
    const std::uint32_t region = place.key - heap_key(0);
    return region < regions_.size() ? regions_[region].at(place.address, bytes) : nullptr;
  }

  /// Adds to a word, with release of everything copied before. Nothing reads the old value, so it goes nowhere.
  void fetch_add(void* word, std::uint64_t add) {
    if (executor_ == nullptr) {
      return void(__atomic_fetch_add(static_cast<std::uint64_t*>(word), add, __ATOMIC_ACQ_REL));
    }
    // Earlier copies are complete before the sum is written: there is one stream, and this waits for it.
    executor_->copy(bounce_.get(), word, sizeof add, stream_->get());
    executor_->synchronize(stream_->get());
    *bounce_ += add;
    executor_->copy(word, bounce_.get(), sizeof add, stream_->get());
    executor_->synchronize(stream_->get());
    copying_ = false;
  }

  std::shared_ptr<Executor> executor_;  ///< that copies; null: this process does
  std::optional<OwnStream> stream_;
  std::shared_ptr<std::uint64_t> bounce_;  ///< pinned: the word that is added to
  bool copying_ = false;                   ///< on the stream
  std::vector<Region> regions_;            ///< see mapped_regions()
  std::vector<bool> failed_;               ///< of each ring
  std::deque<WireCompletion> completions_;
  std::unique_ptr<Wire> wrapped_;
  std::optional<CpuHandler> handler_;  ///< last: its thread uses the rest
};

}  // namespace

std::vector<Region> mapped_regions(const SymmetricHeap& heap, const ConnectionOptions& options, std::string_view wire) {
  std::vector<Region> regions;
  for (std::byte* const mapped : heap.peers()) regions.push_back({mapped, heap.bytes()});
  for (const int peer : options.peers) {
    if (heap.peers()[static_cast<std::size_t>(peer)] != nullptr) continue;
    fail<SystemError>(
        "rank {} reaches rank {} over the wire '{}', but has not mapped its heap: they are not on one host",
        options.rank, peer, wire);
  }
  return regions;
}

std::unique_ptr<Ends> make_local_ends(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap,
                                      const ConnectionOptions& options, const LocalTrial& trial) {
  return std::make_unique<LocalEnds>(executor, heap, options, trial);
}

}  // namespace deep_ep::rdma
