// Calls that do not wait: events in and out, several calls in flight, ranks that run ahead of others.
#include <chrono>
#include <thread>

#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class StreamsTest : public ClusterTest {};
DEEP_EP_ON_THREADS(StreamsTest);

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
