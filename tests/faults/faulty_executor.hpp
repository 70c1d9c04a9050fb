// A CPU executor that fails on purpose, and knows what has not been given back.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "deep_ep/error.hpp"
#include "kernels/rdma/params.hpp"
#include "tests/cluster/launches_executor.hpp"
#include "tests/faults/freezer.hpp"

namespace deep_ep::faults {

class FaultyExecutor final : public test::LaunchesExecutor {
 public:
  FaultyExecutor(const HostExecutorOptions& options, int ranks)
      : LaunchesExecutor(make_host_executor(options)), ranks_(ranks) {}

  const std::shared_ptr<Freezer> freezer = std::make_shared<Freezer>();
  /// Counts down with every allocation. At 1 all fail, until it is 0: MemoryCache tries a second time, in vain.
  int failing_allocation = 0;

  /// From here on in the stream's order, what this rank sends to `peer` names memory that the peer has not registered.
  /// False where it sends nothing by RDMA.
  bool break_key(LowLatencyKind channel, int peer, StreamHandle stream) {
    return break_key(low_latency_, static_cast<int>(channel), peer, stream);
  }
  bool break_key(InternodeChannel channel, int peer, StreamHandle stream) {
    return break_key(internode_, static_cast<int>(channel), peer, stream);
  }

  /// What has been allocated or made, and not given back; empty if nothing.
  std::string left_over() const;

  void* allocate(std::size_t bytes) override;
  void free(void* memory) noexcept override {
    live_ -= memory != nullptr;
    CountingExecutor::free(memory);
  }
  void free_after(void* memory, StreamHandle stream) noexcept override {
    live_ -= memory != nullptr;
    CountingExecutor::free_after(memory, stream);
  }
  void* allocate_pinned(std::size_t bytes) override;
  void free_pinned(void* memory) noexcept override {
    live_ -= memory != nullptr;
    CountingExecutor::free_pinned(memory);
  }

  StreamHandle create_stream() override { return ++streams_, CountingExecutor::create_stream(); }
  void destroy_stream(StreamHandle stream) noexcept override { --streams_, CountingExecutor::destroy_stream(stream); }
  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    note_table(destination, source, bytes);
    CountingExecutor::copy(destination, source, bytes, stream);
  }

 private:
  /// The freezer watches kernels while it is armed.
  void launch(host_machine::KernelLaunch kernel, StreamHandle stream) override {
    host_machine::enqueue(freezer->armed() ? watched(std::move(kernel), freezer) : std::move(kernel), stream);
  }
  bool break_key(RdmaQueuePair* table, int channel, int peer, StreamHandle stream);
  /// Is that a table of queue pairs, and not a tensor of the same size? That of low-latency calls comes first.
  void note_table(void* to, const void* from, std::size_t bytes) {
    constexpr int kChannels = low_latency_channels(1);
    static_assert(kChannels == static_cast<int>(InternodeChannel::count));
    const int entries = kChannels * ranks_;
    if (bytes != static_cast<std::size_t>(entries) * sizeof(RdmaQueuePair)) return;
    const auto* pairs = static_cast<const RdmaQueuePair*>(from);
    for (int i = 0; i < entries; ++i) {
      const RdmaQueuePair& pair = pairs[i];
      if (pair.ring != nullptr ? pair.peer != i % ranks_ : pair.peer != -1) return;
    }
    RdmaQueuePair*& table = low_latency_ == nullptr || low_latency_ == to ? low_latency_ : internode_;
    table = static_cast<RdmaQueuePair*>(to);
  }
  bool fails() {
    if (failing_allocation == 1) return true;
    if (failing_allocation > 1) --failing_allocation;
    return false;
  }

  const int ranks_;
  std::atomic<int> live_ = 0, streams_ = 0;
  /// Device memory: the tables of queue pairs.
  RdmaQueuePair* low_latency_ = nullptr;
  RdmaQueuePair* internode_ = nullptr;
};

}  // namespace deep_ep::faults
