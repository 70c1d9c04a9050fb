// What a row costs the kernel that posts it, in each kind of memory, printed; and that the ring holds what was posted.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/kernels/test_kernel.hpp"
#include "tests/rdma/ring/ring_cost_kernel.hpp"

namespace deep_ep::test {
namespace {

using device::rdma::CompletionEntry;
using device::rdma::WorkQueueEntry;

constexpr std::uint32_t kDepth = 128;
constexpr std::uint32_t kNumber = 0x1234;

/// Memory of a queue pair: all of it in the GPU's, as the `gpu` handler has it, with a word there instead of the
/// device's register; or pinned, as the `cpu` handler has it.
class Ring {
 public:
  Ring(Executor& executor, bool pinned) : executor_(executor), pinned_(pinned) {
    executor_.make_current();
    stream_ = executor_.create_stream();
    memory_ = static_cast<std::byte*>(pinned ? executor_.allocate_pinned(kBytes) : executor_.allocate(kBytes));
    state_ = static_cast<RdmaQueueState*>(executor_.allocate(kStateBytes));
    wait_ = static_cast<FaultRecord*>(executor_.allocate_pinned(2 * sizeof(FaultRecord)));
    executor_.fill(memory_, 0, kBytes, stream_);
    executor_.fill(memory_ + kCompletionAt, 0xff, sizeof(CompletionEntry), stream_);
    executor_.fill(state_, 0, kStateBytes, stream_);
  }
  ~Ring() {
    executor_.synchronize(stream_);
    pinned_ ? executor_.free_pinned(memory_) : executor_.free(memory_);
    executor_.free(state_);
    executor_.free_pinned(wait_);
    executor_.destroy_stream(stream_);
  }

  RingCostParams params(int rounds, bool one_thread) {
    RingCostParams params;
    RdmaQueuePair& queue = params.peer.queue;
    queue.ring = reinterpret_cast<WorkQueueEntry*>(memory_);
    queue.completion = reinterpret_cast<CompletionEntry*>(memory_ + kCompletionAt);
    queue.doorbell = reinterpret_cast<std::uint64_t*>(memory_ + kDoorbellAt);
    queue.doorbell_record = pinned_ ? nullptr : reinterpret_cast<std::uint32_t*>(memory_ + kRecordAt);
    queue.state = state_;
    queue.kind = pinned_ ? RdmaDoorbell::producer_index : RdmaDoorbell::device_register;
    queue.number = kNumber;
    queue.depth = kDepth;
    queue.batch = kDepth / 2;
    queue.system_scope = pinned_;
    queue.peer = 1;
    params.completion = reinterpret_cast<CompletionEntry*>(memory_ + kCompletionAt);
    params.rounds = rounds;
    params.one_thread = one_thread;
    params.cycles = reinterpret_cast<std::int64_t*>(state_ + 1);
    params.wait = {wait_, reinterpret_cast<std::uint64_t*>(state_ + 1) + 3, 10'000'000'000u};
    return params;
  }

  StreamHandle stream() const { return stream_; }

  template <class T>
  T read(const void* from) {
    T value;
    executor_.copy(&value, from, sizeof value, stream_);
    executor_.synchronize(stream_);
    return value;
  }

 private:
  static constexpr std::size_t kCompletionAt = kDepth * sizeof(WorkQueueEntry);
  static constexpr std::size_t kDoorbellAt = kCompletionAt + 128;
  static constexpr std::size_t kRecordAt = kDoorbellAt + 128;
  static constexpr std::size_t kBytes = kRecordAt + 128;
  static constexpr std::size_t kStateBytes = sizeof(RdmaQueueState) + 4 * sizeof(std::uint64_t);

  Executor& executor_;
  bool pinned_;
  StreamHandle stream_ = nullptr;
  std::byte* memory_ = nullptr;
  RdmaQueueState* state_ = nullptr;
  FaultRecord* wait_ = nullptr;
};

void measure(Executor& executor, bool pinned, bool one_thread) {
  const TestKernel<RingCostParams> kernel(DEEP_EP_TEST_LAUNCHERS(ring_cost));
  const bool gpu = executor.device().kind == Device::Kind::cuda;
  const int rounds = gpu ? 1000 : 20;
  Ring ring(executor, pinned);
  RingCostParams params = ring.params(rounds, one_thread);
  kernel(executor, ring.stream(), {1, 32, 0}, params);

  // All entries are there: the last ones as they were posted.
  const std::uint64_t posted = static_cast<std::uint64_t>(rounds) * RingCostParams::kRows;
  const auto state = ring.read<RdmaQueueState>(params.peer.queue.state);
  EXPECT_EQ(state.posted, posted);
  EXPECT_EQ(state.completed, posted);
  EXPECT_EQ(state.failure, 0u);
  for (std::uint64_t index = posted - kDepth; index < posted; ++index) {
    const auto seen = ring.read<WorkQueueEntry>(params.peer.queue.ring + index % kDepth);
    WorkQueueEntry expected = seen;
    const std::uint64_t at = index * RingCostParams::kRowBytes;
    device::rdma::write_entry(expected, {index, kNumber, 0}, {at, 0}, {at, 0}, RingCostParams::kRowBytes);
    if ((index + 1) % RingCostParams::kRows == 0) device::rdma::signal_entry(expected);
    ASSERT_EQ(std::memcmp(&seen, &expected, sizeof seen), 0) << "entry " << index;
  }
  const std::uint64_t doorbell = ring.read<std::uint64_t>(params.peer.queue.doorbell);
  EXPECT_EQ(doorbell, pinned ? posted : device::rdma::doorbell_word(posted, kNumber));

  struct Cycles {
    std::int64_t of[3];
  };
  const auto cycles = ring.read<Cycles>(params.cycles);
  const double per_row = static_cast<double>(rounds) * RingCostParams::kRows;
  std::printf("%s, %s, %s: %.1f to write a row, %.0f to ring 32 rows, %.0f to see them complete (%s)\n",
              to_string(executor.device()).c_str(),
              pinned ? "ring in pinned memory (cpu handler)" : "ring in GPU memory",
              one_thread ? "one thread" : "whole warp", static_cast<double>(cycles.of[0]) / per_row,
              static_cast<double>(cycles.of[1]) / rounds, static_cast<double>(cycles.of[2]) / rounds,
              gpu ? "clock cycles" : "nanoseconds");
}

TEST(RingCost, OfARow) {
  for (const auto& executor : executors_present()) {
    for (const bool pinned : {false, true}) {
      for (const bool one_thread : {false, true}) measure(*executor, pinned, one_thread);
    }
  }
}

}  // namespace
}  // namespace deep_ep::test
