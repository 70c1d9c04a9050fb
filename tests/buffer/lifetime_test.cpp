// Buffers that come and go: several at once, tensors that outlive them, and use after the end.

#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class LifetimeTest : public ClusterTest {};
DEEP_EP_ON_THREADS(LifetimeTest);

TEST_P(LifetimeTest, SeveralAtOnceDoNotDisturbEachOther) {
  DEEP_EP_NEEDS_RANKS(2);
  const Case one = make_case({.tokens = {8, 9}, .seed = 1});
  const Case two = make_case({.tokens = {20, 3}, .topk = 2, .seed = 2});
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer first = rank.own_buffer();
    Buffer second = rank.own_buffer({.heap_bytes = std::size_t{32} << 20});
    const DispatchResult a = first.dispatch(upload_inputs(rank, one).dispatch, rank.call());
    const DispatchResult b = second.dispatch(upload_inputs(rank, two).dispatch, rank.call());
    for (int i = 0; i < 3; ++i) {
      run_round(rank, second, two);
      run_round(rank, first, one);
    }
    check_dispatch(rank, one, a);
    check_dispatch(rank, two, b);
    first.destroy();
    run_round(rank, second, two);
    check_dispatch(rank, two, b);
    second.destroy();
  });
}

TEST_P(LifetimeTest, EveryCallAfterDestroyIsRefused) {
  DEEP_EP_NEEDS_RANKS(2);
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

}  // namespace
}  // namespace deep_ep::test
