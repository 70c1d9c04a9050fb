// Calls that do not wait: events in and out, several calls in flight, ranks that run ahead of others.
#include <chrono>
#include <thread>

#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class StreamsTest : public ClusterTest {};
DEEP_EP_ON_THREADS(StreamsTest);

TEST_P(StreamsTest, AQuickRankCannotOverwriteWhatASlowOneReads) {
  DEEP_EP_NEEDS_RANKS(2);
  const Case one = make_case({.tokens = {30, 30}, .hidden = 256, .combine_hidden = 256});
  const Case two = make_case({.tokens = {30, 30}, .hidden = 256, .combine_hidden = 256, .seed = 2});
  run_with_buffers(cluster(2), [&](Rank& rank, Buffer& buffer) {
    for (int i = 0; i < 6; ++i) {
      for (const Case* now : {&one, &two}) {
        // Makes the order likely in which something could be overwritten; right results do not depend on it.
        if (rank.rank() == i % 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        run_round(rank, buffer, *now, {.num_sms = 0, .returned_in_heap = i % 3 == 0});
      }
      rank.release();
    }
  });
}

}  // namespace
}  // namespace deep_ep::test
