// Buffers that are not made, their end without a rank that has died, and use after the end.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <optional>

#include "deep_ep/result_tensors.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"
#include "tests/cluster/processes.hpp"

namespace deep_ep::test {
namespace {

class LifetimeTest : public ClusterTest {};
DEEP_EP_ON_THREADS(LifetimeTest);

TEST_P(LifetimeTest, EveryCallAfterDestroyIsRefused) {
  const Case one = make_case({.tokens = {8, 9}});
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer buffer = rank.own_buffer();
    const Inputs inputs = upload_inputs(rank, one);
    const DispatchResult result = buffer.dispatch(inputs.dispatch, rank.call());
    Returned returned = upload_returned(rank, buffer, one, result.handle, false);
    Buffer moved = std::move(buffer);
    check_combine(rank, one, moved.combine(returned.combine, rank.call()));
    moved.destroy();
    // NOLINTNEXTLINE(bugprone-use-after-move): what a moved-from buffer does is being tested.
    for (Buffer* gone : {&moved, &buffer}) {
      const auto refuses = [&](const char* what, auto&& call) { require_throws<UseAfterDestroy>(call, {}, what); };
      refuses("dispatch", [&] { gone->dispatch(inputs.dispatch, rank.call()); });
      refuses("combine", [&] { gone->combine(returned.combine, rank.call()); });
      refuses("layout", [&] { gone->get_dispatch_layout(inputs.topk_idx, one.shape.experts(), rank.call()); });
      refuses("allocate_tensor", [&] { gone->allocate_tensor(DType::uint8, {16}, rank.call().stream); });
      refuses("check", [&] { gone->check(); });
      refuses("destroy", [&] { gone->destroy(); });
    }
    require(moved.destroyed(), "destroyed() of a destroyed buffer");
    check_dispatch(rank, one, result);
  });
}

TEST_P(LifetimeTest, ARankThatDropsItsBufferEndsTheCallsThatItHasNotMade) {
  const Case one = make_case({.tokens = {9, 12, 7}});
  const LowLatencyCase few = make_low_latency_case({.tokens = {3, 4, 2}});
  BufferOptions options = low_latency_options(3, 8, 512);
  options.heap_bytes = std::size_t{16} << 20;
  for (const bool low_latency : {false, true}) {
    run_cluster(cluster(3), [&](Rank& rank) {
      std::optional<Buffer> buffer(rank.own_buffer(options));
      const auto call = [&] {
        low_latency ? static_cast<void>(buffer->low_latency_dispatch(upload_arguments(rank, few), rank.call()))
                    : check_dispatch(rank, one, buffer->dispatch(upload_inputs(rank, one).dispatch, rank.call()));
        buffer->check();
      };
      call();
      if (rank.rank() == 1) return buffer.reset();
      require_throws<TimeoutError>(
          call, {"rank 1 has left the buffer", "Rank 1 has not made the call: it has made 1 of this buffer"}, "a call");
      buffer->destroy();  // waits for no rank, either
    });
  }
}

/// Memory of a framework that may have none left.
class PoorFramework final : public ResultTensors {
 public:
  std::vector<Tensor> make(std::span<const TensorView> wanted, const Order&,
                           const std::shared_ptr<HeapPieces>& heap) override {
    if (poor) throw OutOfMemory("no memory for results");
    if (heap != nullptr) return {};
    struct Owned final : Tensor::Storage {
      explicit Owned(std::size_t bytes) : memory(bytes + 1) {}
      void record_stream(StreamHandle) override {}
      std::vector<std::byte> memory;
    };
    std::vector<Tensor> made;
    for (TensorView view : wanted) {
      const auto owner = std::make_shared<Owned>(view.bytes());
      view.data = owner->memory.data();
      made.emplace_back(view, owner);
    }
    return made;
  }
  bool poor = false;
};

class HalfWayTest : public ClusterTest {};
INSTANTIATE_TEST_SUITE_P(On, HalfWayTest, testing::Values(Where{Target::host, Placement::threads}), name_of_place);

TEST_P(HalfWayTest, ACallThatFailsBehindItsFirstExchangeEndsTheBufferOnAllRanks) {
  const Case one = make_case({.tokens = {9, 12}});
  run_cluster(cluster(2), [&](Rank& rank) {
    const auto framework = std::make_shared<PoorFramework>();
    Buffer buffer = rank.own_buffer({.heap_bytes = std::size_t{16} << 20, .result_tensors = framework});
    const auto call = [&](std::int64_t most) {
      DispatchArguments arguments = upload_inputs(rank, one).dispatch;
      arguments.num_worst_tokens = most;
      const DispatchResult result = buffer.dispatch(arguments, rank.call());
      buffer.check();
    };
    call(0);
    if (rank.rank() == 1) {
      framework->poor = true;
      require_throws<OutOfMemory>([&] { call(100); }, {"no memory for results"}, "made before the exchange");
      framework->poor = false;
    }
    call(100);  // the other rank has waited for it
    if (rank.rank() == 0) {
      const std::string why = "rank 1 has ended the call, and its own error says why";
      require_throws<RankMismatch>([&] { call(0); }, {why}, "the peer's call");
    } else {
      framework->poor = true;
      require_throws<OutOfMemory>([&] { call(0); }, {"no memory for results"}, "made behind the exchange");
      framework->poor = false;
      const std::string why = "an earlier call failed after other ranks had begun it";
      require_throws<Error>([&] { call(0); }, {why, "destroy the buffer"}, "a later call");
    }
  });
}

class LifetimeProcessesTest : public ClusterTest {
 protected:
  bool processes_have_threads() const override { return true; }
};
DEEP_EP_ON_PROCESSES(LifetimeProcessesTest);

TEST_P(LifetimeProcessesTest, ADeadRankIsNotWaitedForAtTheEnd) {
  ClusterOptions options = cluster(4);
  options.lost_ranks = {2};
  options.timeout_s = std::min(scaled(60), cluster_patience() / 2);
  run_cluster(options, [&](Rank& rank) {
    Buffer buffer = rank.own_buffer();
    rank.bootstrap()->barrier();
    if (rank.rank() == 2) ::raise(SIGKILL);
    const auto begin = std::chrono::steady_clock::now();
    buffer.destroy();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    require(waited.count() < options.timeout_s / 4, "destroy took " + std::to_string(waited.count()) + " s");
  });
}

/// Wherever that is: here where no rank sees it of the others.
TEST(Creation, AFailureOfOneRankIsToldToAll) {
  const auto errors = run_rank_threads(3, [](const auto& bootstrap) {
    HostExecutorOptions host;
    if (bootstrap->rank() == 1) host.max_shared_bytes = std::size_t{8} << 10;
    const Buffer buffer(bootstrap, make_host_executor(host), {.heap_bytes = std::size_t{4} << 20});
  });
  EXPECT_TRUE(errors[1].starts_with("max_shared_bytes of the executor is 8192, allowed: 16384 to ")) << errors[1];
  for (const std::size_t rank : {0, 2}) EXPECT_EQ(errors[rank], "making a Buffer failed on rank 1: " + errors[1]);
}

}  // namespace
}  // namespace deep_ep::test
