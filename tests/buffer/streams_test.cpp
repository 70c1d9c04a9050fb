// Calls that do not wait: events in and out, several calls in flight, ranks that run ahead of others.
#include <chrono>
#include <thread>

#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class StreamsTest : public ClusterTest {};
DEEP_EP_ON_THREADS(StreamsTest);

/// Rounds that share the routing of the first (so that one handle serves all) but not the data.
std::vector<Case> same_routing(const Shape& shape, int count) {
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    Shape next = shape;
    next.combine_hidden = shape.combine_hidden + 8 * i;
    cases.push_back(make_case(next));
  }
  return cases;
}

TEST_P(StreamsTest, ManyCallsInFlightWithEvents) {
  DEEP_EP_NEEDS_RANKS(3);
  const std::vector<Case> cases =
      same_routing({.tokens = {18, 4, 25}, .hidden = 128, .combine_hidden = 64, .bias_0 = true}, 8);
  run_cluster(cluster(3), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
    const DispatchResult original = buffer.dispatch(upload_inputs(rank, cases[0]).dispatch, rank.call());
    std::vector<Inputs> inputs;
    std::vector<Returned> returned;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      inputs.push_back(upload_inputs(rank, cases[i]));
      // Pull and push alternate, so that each is in flight before and after the other.
      returned.push_back(upload_returned(rank, buffer, cases[i], original.handle, i % 2 == 0));
    }
    std::vector<DispatchResult> dispatched;
    std::vector<CombineResult> combined;
    EventHandle previous;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      CallOptions call{.stream = rank.stream(), .previous_event = previous, .async_finish = true};
      CachedDispatchArguments cached;
      cached.x = inputs[i].dispatch.x;
      cached.handle = &original.handle;
      dispatched.push_back(with_handle(buffer.cached_dispatch(cached, call), original.handle));
      require(dispatched.back().event != nullptr, "async_finish gives an event");
      call.previous_event = dispatched.back().event;
      combined.push_back(buffer.combine(returned[i].combine, call));
      require(combined.back().event != nullptr, "async_finish gives an event");
      previous = combined.back().event;
      // One rank is always late, so the others are several calls ahead. The time makes that likely, and decides
      // nothing.
      if (rank.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
    for (std::size_t i = 0; i < cases.size(); ++i) {
      rank.executor()->wait_event(rank.stream(), dispatched[i].event);
      rank.executor()->wait_event(rank.stream(), combined[i].event);
      check_dispatch(rank, cases[i], dispatched[i], {.cached = true});
      check_combine(rank, cases[i], combined[i]);
    }
    buffer.destroy();
  });
}

TEST_P(StreamsTest, AWholeRoundInFlightWithWorstCaseSizes) {
  DEEP_EP_NEEDS_RANKS(2);
  const Case one = make_case({.tokens = {18, 25}});
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
    Inputs inputs = upload_inputs(rank, one);
    inputs.dispatch.num_worst_tokens = 64;
    CallOptions call{.stream = rank.stream(), .previous_event = {}, .async_finish = true};
    for (int i = 0; i < 3; ++i) {
      const DispatchLayout layout = buffer.get_dispatch_layout(inputs.topk_idx, one.shape.experts(), call);
      require(layout.event != nullptr, "async_finish gives an event");
      inputs.dispatch.use(layout);
      call.previous_event = layout.event;
      const DispatchResult dispatched = buffer.dispatch(inputs.dispatch, call);
      CombineArguments arguments;
      arguments.x = dispatched.recv_x.view();
      arguments.handle = &dispatched.handle;
      call.previous_event = dispatched.event;
      const CombineResult combined = buffer.combine(arguments, call);
      rank.executor()->wait_event(rank.stream(), combined.event);
      check_layout(rank, one, layout);
      check_dispatch(rank, one, dispatched, {.cached = false, .num_worst_tokens = 64});
      call.previous_event = nullptr;
    }
    buffer.destroy();
  });
}

TEST_P(StreamsTest, PreviousEventAloneOrdersTheInputs) {
  DEEP_EP_NEEDS_RANKS(2);
  const Case one = make_case({.tokens = {64, 50}, .hidden = 512});
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
    const DispatchResult first = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
    const Inputs good = upload_inputs(rank, one);
    const ConstTensorView& x = good.dispatch.x;
    Executor& executor = *rank.executor();
    const StreamHandle side = executor.create_stream();
    void* const produced = rank.allocate(x.bytes());
    constexpr std::size_t kSlow = std::size_t{32} << 20;
    void* const slow = rank.allocate(kSlow);
    executor.fill(produced, 0xee, x.bytes(), side);
    executor.synchronize(side);
    for (int i = 0; i < 8; ++i) executor.fill(slow, i, kSlow, side);  // so that the data comes late
    executor.copy(produced, x.data, x.bytes(), side);
    CachedDispatchArguments cached;
    cached.x = x;
    cached.x.data = produced;
    cached.handle = &first.handle;
    CallOptions call = rank.call();
    call.previous_event = executor.record_event(side);
    check_dispatch(rank, one, with_handle(buffer.cached_dispatch(cached, call), first.handle), {.cached = true});
    executor.synchronize(side);
    executor.destroy_stream(side);
    buffer.destroy();
  });
}

TEST_P(StreamsTest, WithoutAnEventTheStreamOrdersTheInputs) {
  DEEP_EP_NEEDS_RANKS(2);
  const Case one = make_case({.tokens = {64, 50}, .hidden = 512});
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
    const Inputs good = upload_inputs(rank, one);
    Executor& executor = *rank.executor();
    Inputs late = good;
    late.dispatch.x.data = rank.allocate(good.dispatch.x.bytes());
    constexpr std::size_t kSlow = std::size_t{32} << 20;
    void* const slow = rank.allocate(kSlow);
    for (int i = 0; i < 8; ++i) executor.fill(slow, i, kSlow, rank.stream());
    executor.copy(const_cast<void*>(late.dispatch.x.data), good.dispatch.x.data, good.dispatch.x.bytes(),
                  rank.stream());
    check_dispatch(rank, one, buffer.dispatch(late.dispatch, rank.call()));
    buffer.destroy();
  });
}

TEST_P(StreamsTest, TheDefaultStreamWorks) {
  DEEP_EP_NEEDS_RANKS(2);
  const Case one = make_case({.tokens = {7, 9}});
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
    const DispatchResult result = buffer.dispatch(upload_inputs(rank, one).dispatch);
    rank.executor()->synchronize(nullptr);
    check_dispatch(rank, one, result);
    buffer.destroy();
  });
}

TEST_P(StreamsTest, AQuickRankCannotOverwriteWhatASlowOneReads) {
  DEEP_EP_NEEDS_RANKS(2);
  const Case one = make_case({.tokens = {30, 30}, .hidden = 256, .combine_hidden = 256});
  const Case two = make_case({.tokens = {30, 30}, .hidden = 256, .combine_hidden = 256, .seed = 2});
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
    for (int i = 0; i < 6; ++i) {
      for (const Case* now : {&one, &two}) {
        // Makes the order likely in which something could be overwritten; right results do not depend on it.
        if (rank.rank() == i % 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        run_round(rank, buffer, *now, {.config = {}, .returned_in_heap = i % 3 == 0});
      }
      rank.release();
    }
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
