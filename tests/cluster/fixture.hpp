// What the cluster tests share: the places they run in, and seeds and numbers from the environment.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "tests/cluster/exchange.hpp"

namespace deep_ep::test {

/// A test that runs wherever GetParam() says.
class ClusterTest : public testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    if (under_thread_sanitizer() && GetParam().placement == Placement::processes && !processes_have_threads()) {
      GTEST_SKIP() << "ThreadSanitizer sees one process, so one rank, and less than where ranks are threads";
    }
  }
  /// Whether ranks that are processes run threads that ranks which are threads do not.
  virtual bool processes_have_threads() const { return false; }
  ClusterOptions cluster(int ranks) const { return {.ranks = ranks, .where = GetParam()}; }
  /// Where some ranks wait in the bootstrap while others go through deadlines.
  ClusterOptions cluster_with_absentees(int ranks) const {
    ClusterOptions options = cluster(ranks);
    options.sits_out = true;
    return options;
  }
};

inline std::string name_of_place(const testing::TestParamInfo<Where>& info) { return to_string(info.param); }

/// On the CPU always; on GPUs where there are enough.
inline constexpr Where kThreads[] = {{Target::host, Placement::threads}, {Target::cuda, Placement::threads}};
inline constexpr Where kProcesses[] = {{Target::host, Placement::processes}, {Target::cuda, Placement::processes}};
#define DEEP_EP_ON_THREADS(Suite) INSTANTIATE_TEST_SUITE_P(On, Suite, testing::ValuesIn(kThreads), name_of_place)
#define DEEP_EP_ON_PROCESSES(Suite) INSTANTIATE_TEST_SUITE_P(On, Suite, testing::ValuesIn(kProcesses), name_of_place)

/// Low-latency calls over NVLink as above, and between nodes over RDMA, which the local wire plays. What does not
/// depend on the way runs ON_THREADS. (Under ThreadSanitizer all this would take too long;
/// buffer/low_latency/rdma_test.cpp is for it.)
#if defined(__SANITIZE_THREAD__)
inline constexpr Where kLowLatencyThreads[] = {{Target::host, Placement::threads}};
#else
inline constexpr Where kLowLatencyThreads[] = {
    {Target::host, Placement::threads},
    {Target::host, Placement::threads, Topology::two_nodes},
    {Target::cuda, Placement::threads},
    {Target::cuda, Placement::threads, Topology::two_nodes},
};
#endif
/// Only for the tests of rails.
inline constexpr Where kRailThreads[] = {{Target::host, Placement::threads, Topology::rails},
                                         {Target::cuda, Placement::threads, Topology::rails}};
#define DEEP_EP_LOW_LATENCY_ON_THREADS(Suite) \
  INSTANTIATE_TEST_SUITE_P(On, Suite, testing::ValuesIn(kLowLatencyThreads), name_of_place)

#define DEEP_EP_BY_RAILS(Suite) INSTANTIATE_TEST_SUITE_P(On, Suite, testing::ValuesIn(kRailThreads), name_of_place)

/// Sizes of otherwise equal calls: all of them; under ThreadSanitizer, which sees the same threads in each, the ends.
template <class T>
std::vector<T> ends_of(std::initializer_list<T> sizes) {
  if (under_thread_sanitizer()) return {*sizes.begin(), *(sizes.end() - 1)};
  return sizes;
}

/// The variable's value, or `otherwise` if it is not set.
std::int64_t environment_number(const char* name, std::int64_t otherwise);

/// How many schedules a test tries: usually, and under a sanitizer, which is slow.
struct Schedules {
  std::int64_t usually, sanitized = 1, thread_sanitized = sanitized;
};

/// `call(seed)` for each of these schedules of the CPU executor, unless the environment says how many, or from which
/// on.
template <class Call>
void under_schedules(const Schedules& schedules, const Call& call) {
  const std::int64_t first = environment_number("DEEP_EP_TEST_FIRST_SCHEDULE", 1);
  const std::int64_t count =
      environment_number("DEEP_EP_TEST_SCHEDULES", under_thread_sanitizer() ? schedules.thread_sanitized
                                                   : under_sanitizer()      ? schedules.sanitized
                                                                            : schedules.usually);
  for (std::int64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("DEEP_EP_TEST_FIRST_SCHEDULE=" + std::to_string(seed));
    ASSERT_NO_THROW(call(static_cast<std::uint64_t>(seed)));
  }
}

/// The seed of randomised tests: DEEP_EP_TEST_SEED, or a new one each time. Printed either way.
std::uint64_t test_seed();

/// Runs every shape as one round after the other on one buffer. All shapes have the same number of ranks.
void run_rounds(const ClusterOptions& cluster, std::span<const Shape> shapes, const RoundOptions& round = {},
                const BufferOptions& buffer = {.heap_bytes = std::size_t{64} << 20});

}  // namespace deep_ep::test
