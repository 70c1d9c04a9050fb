// Options that another layer sets for its users: experts that do not exist, the program's own stream, a look at the
// memory.
#include "csrc/buffer/options.hpp"
#include "csrc/buffer/buffer_plan.hpp"
#include "tests/cluster/counting_executor.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/memory/fake_executor.hpp"

namespace deep_ep::test {
namespace {

class OptionsTest : public ClusterTest {};
DEEP_EP_ON_THREADS(OptionsTest);

TEST_P(OptionsTest, NodesAreCountedWithoutABuffer) {
  run_cluster(cluster(2), [&](Rank& rank) {
    const auto nodes = [&](int width) { return Buffer::count_nodes(rank.bootstrap(), rank.executor(), width); };
    require(nodes(2) == 1 && nodes(1) == 2, "nodes of two ranks");
    require_throws<InvalidArgument>([&] { nodes(3); }, {"ranks_per_node is 3"}, "a node of three");
    require(Buffer(rank.bootstrap(), rank.executor(), {}).num_nodes() >= 1, "a buffer after it");
  });
}

TEST_P(OptionsTest, StreamOfTheProgram) {
  const Case one = make_case({.tokens = {9, 14}, .hidden = 64, .combine_hidden = 32});
  run_cluster(cluster(2), [&](Rank& rank) {
    const StreamHandle stream = rank.executor()->create_stream();
    {
      Buffer buffer = rank.own_buffer({.heap_bytes = std::size_t{16} << 20, .comm_stream = stream});
      require(buffer.comm_stream() == stream, "comm_stream() is the stream that was given");
      check_dispatch(rank, one, buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call()));
      buffer.destroy();
    }
    // Still there: the buffer does not own it.
    rank.executor()->synchronize_event(rank.executor()->record_event(stream));
    rank.executor()->destroy_stream(stream);
  });
}

TEST_P(OptionsTest, LocalMemoryHasAllHeapBytes) {
  run_cluster(cluster(2), [](Rank& rank) {
    constexpr std::size_t kHeap = std::size_t{16} << 20;
    Buffer& buffer = rank.buffer({.heap_bytes = kHeap});
    const TensorView memory = buffer.local_memory();
    require(memory.dtype == DType::uint8 && memory.dims == 1, "one dimension of bytes");
    require(memory.bytes() >= kHeap && memory.bytes() < kHeap + (std::size_t{4} << 20), "what was asked for, in pages");
    require(!buffer.in_heap(memory), "combine must not pull from where peers push to");
    const Tensor tensor = buffer.allocate_tensor(DType::uint8, {1000}, rank.call().stream);
    require(tensor.as<std::byte>() >= memory.as<std::byte>() &&
                tensor.as<std::byte>() + 1000 <= memory.as<std::byte>() + memory.bytes(),
            "tensors of the heap lie in it");
    require(buffer.in_heap(tensor.view()), "combine may pull from a tensor of the heap");
    buffer.destroy();
  });
}

TEST_P(OptionsTest, BetweenNodesTheHeapMayHaveAnotherSize) {
  run_cluster(cluster(2), [](Rank& rank) {
    for (const int ranks_per_node : {2, 1}) {
      constexpr std::size_t kInside = std::size_t{16} << 20, kBetween = std::size_t{48} << 20;
      Buffer& buffer = rank.buffer({.heap_bytes = kInside,
                                    .window_bytes = std::size_t{2} << 20,
                                    .ranks_per_node = ranks_per_node,
                                    .internode = {.heap_bytes = kBetween}});
      const bool between = ranks_per_node == 1;
      const std::size_t bytes = buffer.local_memory().bytes();
      require((bytes >= kBetween) == between, "its size is that of " + std::to_string(buffer.num_nodes()) + " nodes");
      require(buffer.options().heap_bytes == (between ? kBetween : kInside), "the options say so");
      require((buffer.options().window_bytes == 0) == between, "and the window");
      buffer.destroy();
    }
    const std::size_t bytes = (rank.rank() == 0 ? std::size_t{16} : std::size_t{17}) << 20;
    require_throws<RankMismatch>([&] { rank.own_buffer({.internode = {.heap_bytes = bytes}}); },
                                 {"internode.heap_bytes is", "on rank 0", "on rank 1"}, "other heaps");
  });
}

TEST_P(OptionsTest, RanksMustAgree) {
  run_cluster(cluster(2), [](Rank& rank) {
    const std::size_t bytes = (rank.rank() == 0 ? std::size_t{16} : std::size_t{17}) << 20;
    require_throws<RankMismatch>([&] { rank.own_buffer({.heap_bytes = bytes}); },
                                 {"heap_bytes is", "on rank 0", "on rank 1"}, "other heaps");
    // So that all have as many lanes where these are left open.
    const InternodeOptions lanes{.num_qps_per_rank = rank.rank() + 2};
    require_throws<RankMismatch>([&] { rank.own_buffer({.internode = lanes}); }, {"internode.num_qps_per_rank is"},
                                 "other bounds of lanes");
    // Without masking each waits as it likes.
    BufferOptions options{.timeout_s = rank.rank() + 30.5};
    rank.own_buffer(options).destroy();
    options.low_latency = {.bytes = std::size_t{1} << 20, .masking = true};
    require_throws<RankMismatch>(
        [&] { rank.own_buffer(options); },
        {"the time-out in ms of a buffer with masking is", "30500 on rank 0", "31500 on rank 1"}, "time-outs");
  });
}

TEST_P(OptionsTest, SizesThatWouldWrapAreRefused) {
  run_cluster(cluster(1), [](Rank& rank) {
    constexpr std::size_t kHuge = ~std::size_t{0} - 127;
    require_throws<InvalidArgument>([&] { rank.own_buffer({.low_latency = {.bytes = kHuge}}); }, {"low_latency.bytes"},
                                    "low_latency.bytes");
    require_throws<InvalidArgument>([&] { rank.own_buffer({.heap_bytes = kHuge}); }, {"heap_bytes"}, "heap_bytes");
  });
}

/// They may even differ.
TEST_P(OptionsTest, OptionsOfCallsWithoutMemoryHaveNoEffect) {
  run_cluster(cluster(2), [](Rank& rank) {
    LowLatencyOptions none;
    if (rank.rank() == 0) none = {.masking = true, .allow_nvlink = false, .rails = LowLatencyRails::always, .lanes = 3};
    Buffer& buffer = rank.buffer({.low_latency = none});
    require(!buffer.options().low_latency.masking, "masking without such calls");
    buffer.destroy();
  });
}

TEST_P(OptionsTest, LowLatencyCallsNeedNoHeapBytes) {
  run_cluster(cluster(2), [](Rank& rank) {
    for (const int ranks_per_node : {2, 1}) {
      Buffer buffer = rank.own_buffer({.heap_bytes = 0, .ranks_per_node = ranks_per_node});
      require_throws<OutOfMemory>([&] { buffer.allocate_tensor(DType::uint8, {1 << 22}, rank.call().stream); },
                                  {"does not fit the heap of"}, "no room");
      buffer.barrier(rank.call());
      const Case one = make_case({.tokens = {9, 14}, .hidden = 64, .combine_hidden = 32});
      // On one rank: it does not wait for the other one.
      if (rank.rank() == 1) {
        require_throws<InvalidArgument>([&] { buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call()); },
                                        {"Buffer::dispatch needs a window, but the buffer's heap_bytes is 0"},
                                        "dispatch");
        require_throws<InvalidArgument>([&] { buffer.combine({}, rank.call()); }, {"needs a window"}, "combine");
        require_throws<InvalidArgument>([&] { buffer.dispatch_elastic({}, rank.call()); }, {"needs a window"}, "V2");
      }
      buffer.destroy();
    }
  });
}

/// A GPU of its own for each rank; that of rank 1 cannot add to memory of the last one.
class WithoutAtomics final : public CountingExecutor {
 public:
  explicit WithoutAtomics(const Rank& rank) : CountingExecutor(rank.executor()), rank_(rank.rank()) {}
  DeviceIdentity identity() const override { return {.uuid = gpu(rank_)}; }
  bool adds_atomically_to(const DeviceIdentity& device) const override { return rank_ != 1 || device.uuid != gpu(2); }

 private:
  static std::array<std::uint8_t, 16> gpu(int rank) { return {static_cast<std::uint8_t>(0xa0 + rank)}; }
  int rank_;
};

TEST_P(OptionsTest, GpusWithoutAtomicsMakeNoNode) {
  run_cluster(cluster(3), [](Rank& rank) {
    const auto make = [&](const BufferOptions& options) {
      Buffer(rank.bootstrap(), std::make_shared<WithoutAtomics>(rank), options).destroy();
    };
    const std::vector<std::string> words = {
        "GPU-a1000000-0000-0000-0000-000000000000 of rank 1 cannot add atomically to memory of "
        "GPU-a2000000-0000-0000-0000-000000000000 of rank 2, allowed: GPUs of a node that are joined by NVLink"};
    const auto with_window = [&] { make({.heap_bytes = 1 << 20}); };
    rank.rank() == 1 ? require_throws<Unsupported>(with_window, words, "the rank that finds it")
                     : require_throws<Error>(with_window, words, "other ranks");
    make({.heap_bytes = 0});
    make({.heap_bytes = 1 << 20, .ranks_per_node = 1});
  });
}

TEST(BufferHints, ScalesAndSelectionsCount) {
  const std::size_t rows = Buffer::heap_bytes_hint(8, 4096, 7168, 0, 0);
  EXPECT_GE(rows, std::size_t{8} * 4096 * (7168 + 4));
  EXPECT_EQ(Buffer::heap_bytes_hint(8, 4096, 7168, 0), Buffer::heap_bytes_hint(8, 4096, 7168, 0, 7168 / 32));
  EXPECT_GE(Buffer::heap_bytes_hint(8, 4096, 7168, 8), Buffer::heap_bytes_hint(8, 4096, 7168, 0) + 8 * 4096 * 96);
  EXPECT_THROW(Buffer::heap_bytes_hint(8, 4096, 7168, 33), InvalidArgument);
  EXPECT_THROW(Buffer::heap_bytes_hint(8, -1, 7168, 8), InvalidArgument);
}

TEST(BufferHints, LowLatencyMemoryGrowsWithTheBitsOfSums) {
  const auto hint = [](LowLatencySums sums) { return Buffer::low_latency_bytes_hint(128, 7168, 8, 256, sums); };
  EXPECT_LT(hint(LowLatencySums::bf16), hint(LowLatencySums::fp24));
  EXPECT_LT(hint(LowLatencySums::fp24), hint(LowLatencySums::fp32));
}

TEST(BufferHints, SizesThatWouldWrapAreRefused) {
  EXPECT_THROW(Buffer::heap_bytes_hint(1, INT32_MAX, INT32_MAX, 32, INT32_MAX), InvalidArgument);
  EXPECT_THROW(Buffer::low_latency_bytes_hint(INT32_MAX, 7168, 8, 256), InvalidArgument);
  EXPECT_THROW(Buffer::low_latency_bytes_hint(128, std::int64_t{1} << 62, 8, 256), InvalidArgument);
  EXPECT_THROW(Buffer::low_latency_bytes_hint(128, -7168, 8, 256), InvalidArgument);
  EXPECT_THROW(Buffer::low_latency_bytes_hint(128, 7168, 8, -256), InvalidArgument);
}

TEST(HeapLayout, TooLittleIsRefused) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  require_throws<InvalidArgument>([&] { with_environment({.heap_bytes = kMiB, .window_bytes = 2 * kMiB}, 2); },
                                  {"window_bytes is 2097152, allowed: at most heap_bytes, 1048576"}, "in a node");
  const auto layout = [](const BufferOptions& options) {
    return BufferPlan::make(options, NodeMembership::of_domains(0, std::vector(8, 0), 8)).layout;
  };
  EXPECT_EQ(layout({.heap_bytes = kMiB, .window_bytes = kMiB}).arena_bytes, 0u);
  EXPECT_THROW(layout({.low_latency = {.bytes = 4096}}), InvalidArgument);
}

/// A rank has the part of its GPU's multiprocessors that it shares with others, less those of kernels that play NICs.
TEST(DeviceShare, RanksOfAGpuHaveEqualParts) {
  const auto gpu = [](std::uint8_t number) { return DeviceIdentity{.uuid = {number}, .multiprocessors = 132}; };
  const auto sms = [](int of_context, const DeviceIdentity& mine, const std::vector<DeviceIdentity>& all) {
    return share_device({.multiprocessors = of_context}, mine, all).multiprocessors;
  };
  EXPECT_EQ(sms(132, gpu(1), {gpu(1), gpu(2)}), 132);
  EXPECT_EQ(sms(132, gpu(1), {gpu(1), gpu(2), gpu(1), gpu(2)}), 58);
  // Contexts of CUDA MPS may have more, or less.
  EXPECT_EQ(sms(32, gpu(1), {gpu(1), gpu(1), gpu(1), gpu(1)}), 29);
  EXPECT_EQ(sms(20, gpu(1), {gpu(1), gpu(1), gpu(1), gpu(1)}), 20);
  DeviceIdentity plays = gpu(1);
  plays.kept = 2;
  EXPECT_EQ(sms(130, plays, {plays, plays}), 56);
  EXPECT_EQ(sms(4, {}, {{}, {}, {}}), 4) << "ranks on CPUs are scheduled by the system";
}

/// A program may wrap an executor, or write one, but kernels run on the library's alone.
TEST(Executors, OfTheProgramsOwnMakingAreRefused) {
  EXPECT_THROW(Buffer(make_thread_bootstraps(1).front(), std::make_shared<FakeExecutor>()), InvalidArgument);
  EXPECT_THROW(Buffer(make_thread_bootstraps(1).front(), nullptr), InvalidArgument);
}

}  // namespace
}  // namespace deep_ep::test
