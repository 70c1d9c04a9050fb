// What a row costs the kernel that posts it, in each kind of memory, printed; and that the ring holds what was posted.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <memory>

#include "csrc/executor/own_stream.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "tests/kernels/test_kernel.hpp"
#include "tests/rdma/ring/ring_cost_kernel.hpp"

namespace deep_ep::test {
namespace {

using device::rdma::WorkQueueEntry;

constexpr std::uint32_t kDepth = 128;
constexpr std::uint32_t kNumber = 0x1234;

/// A queue pair: all of its memory in the GPU's, as the `gpu` handler has it, with a word there instead of the device's
/// register; or pinned, as the `cpu` handler has it.
class Ring {
 public:
  Ring(const std::shared_ptr<Executor>& executor, bool pinned)
      : executor_(*executor),
        pinned_(pinned),
        stream_(*executor),
        memory_(executor, {.depth = kDepth, .batch = kDepth / 2, .on_gpu = !pinned}),
        words_(static_cast<std::uint64_t*>(executor->allocate(kWords * sizeof(std::uint64_t)))),
        faults_(*executor, 2) {
    executor_.fill(words_, 0, kWords * sizeof(std::uint64_t), stream_.get());
  }
  ~Ring() {
    executor_.synchronize(stream_.get());
    executor_.free(words_);
  }

  RingCostParams params(int rounds, bool one_thread) {
    RingCostParams params;
    RdmaQueuePair& queue = params.peer.queue;
    queue = memory_.queue_pair(0, kNumber, /*peer=*/1);
    if (!pinned_) {
      queue.doorbell = words_;
      queue.doorbell_record = memory_.doorbell_record(0);
      queue.kind = RdmaDoorbell::device_register;
    }
    queue.system_scope = pinned_;
    params.completion = memory_.completion(0);
    params.rounds = rounds;
    params.one_thread = one_thread;
    params.cycles = reinterpret_cast<std::int64_t*>(words_ + 1);
    params.wait = {faults_.data(), words_ + 4, 10'000'000'000u};
    return params;
  }

  StreamHandle stream() const { return stream_.get(); }

  template <class T>
  T read(const void* from) {
    T value;
    executor_.copy(&value, from, sizeof value, stream_.get());
    executor_.synchronize(stream_.get());
    return value;
  }

 private:
  static constexpr std::size_t kWords = 5;  // register, three counts of cycles, abort

  Executor& executor_;
  bool pinned_;
  OwnStream stream_;
  rdma::RingMemory memory_;
  std::uint64_t* words_;
  Shared<FaultRecord> faults_;
};

void measure(const std::shared_ptr<Executor>& on, bool pinned, bool one_thread) {
  Executor& executor = *on;
  executor.make_current();
  const TestKernel<RingCostParams> kernel(DEEP_EP_TEST_LAUNCHERS(ring_cost));
  const bool gpu = executor.device().kind == Device::Kind::cuda;
  const int rounds = gpu ? 1000 : 20;
  Ring ring(on, pinned);
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
      for (const bool one_thread : {false, true}) measure(executor, pinned, one_thread);
    }
  }
}

}  // namespace
}  // namespace deep_ep::test
