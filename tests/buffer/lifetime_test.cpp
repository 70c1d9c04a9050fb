// Buffers that are not made, their end without a rank that has died, and use after the end.
#include <algorithm>
#include <chrono>
#include <csignal>

#include "tests/cluster/fixture.hpp"
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
