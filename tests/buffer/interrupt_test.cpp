// Waits that the caller ends, as Python does when Ctrl-C is pressed.
#include "deep_ep/interrupt.hpp"

#include <chrono>
#include <cstddef>
#include <functional>
#include <thread>

#include "csrc/support/deadline.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

class InterruptTest : public ClusterTest {
 protected:
  /// Rank 1 never comes. Rank 0 gives up at the third question, long before its deadline.
  void expect_interruption(const BufferOptions& options, const std::function<void(Rank&, Buffer&)>& call) {
    run_cluster(cluster_with_absentees(2), [&](Rank& rank) {
      BufferOptions patient = options;
      patient.timeout_s = 100 * short_deadline();
      Buffer& buffer = rank.buffer(patient);
      if (rank.rank() == 0) {
        int questions = 0;
        {
          const InterruptScope scope([&] {
            require_throws<Error>([&] { buffer.destroy(); }, {"destroy: this thread is in"}, "destroy in a question");
            return ++questions == 3;
          });
          require_throws<Interrupted>([&] { call(rank, buffer); }, {"rank 0", "interrupted"}, "the call");
        }
        require(!InterruptScope::wanted() && questions == 3, "the scope has ended");
        require_throws<Interrupted>([&] { buffer.check(); }, {"destroy the buffer"}, "a later call");
        buffer.destroy();  // and the kernel does not wait, either
      }
      rank.bootstrap()->barrier();
    });
  }
};
INSTANTIATE_TEST_SUITE_P(On, InterruptTest, testing::Values(Where{Target::host, Placement::threads}), name_of_place);

TEST_P(InterruptTest, ADispatchThatWaitsForCounts) {
  const Case one = make_case({.tokens = {9, 12}});
  expect_interruption({.heap_bytes = std::size_t{16} << 20}, [&](Rank& rank, Buffer& buffer) {
    buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
  });
}

TEST_P(InterruptTest, ACheckThatWaitsForKernels) {
  const LowLatencyCase one = make_low_latency_case({});
  expect_interruption(low_latency_options(2, 4, 512), [&](Rank& rank, Buffer& buffer) {
    buffer.low_latency_dispatch(upload_arguments(rank, one), rank.call());
    buffer.check();
  });
}

TEST_P(InterruptTest, ScopesLieInOneAnother) {
  EXPECT_FALSE(InterruptScope::wanted()) << "there is no scope";
  const InterruptScope outer([] { return true; });
  {
    const InterruptScope inner([] { return false; });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // not every question is passed on
    EXPECT_FALSE(InterruptScope::wanted());
  }
  // Again where the machine takes too long between the two, or the question before was less than 100 ms ago.
  for (const Deadline deadline(patience());;) {
    ASSERT_FALSE(deadline.expired()) << "no question is passed on, or the machine stands still";
    const auto begin = std::chrono::steady_clock::now();
    const bool first = InterruptScope::wanted(), second = InterruptScope::wanted();
    if (!first || std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(50)) continue;
    EXPECT_FALSE(second) << "only a moment later";
    break;
  }
}

}  // namespace
}  // namespace deep_ep::test
