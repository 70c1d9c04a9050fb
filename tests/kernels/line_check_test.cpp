// What a buffer over a fabric tries when it is made: whether lines of 128 bytes arrive whole.
#include "csrc/buffer/line_check.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/kernel_list.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/kernels/defects/defects.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

constexpr int kLineRanks = 3;

/// What each rank met. Rank `odd` runs `its_kernel`, the others the library's.
std::vector<std::string> check_lines_with(int odd, Launcher<LineTestParams> its_kernel, double timeout_s) {
  const auto bootstraps = make_thread_bootstraps(kLineRanks, long_patience());
  return run_threads(kLineRanks, [&](int rank) {
    Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
    const std::shared_ptr<Backend> executor = backend_of(make_host_executor());
    const auto heap = executor->create_heap(bootstrap, {.bytes = LineTestParams::bytes(kLineRanks)});
    const StreamHandle stream = executor->create_stream();
    std::string met;
    try {
      check_lines(bootstrap, executor, *heap, stream,
                  {.rounds = 20, .timeout_s = timeout_s, .kernel = rank == odd ? its_kernel : nullptr});
      for (std::size_t i = 0; i < LineTestParams::bytes(kLineRanks); ++i) {
        if (heap->local()[i] != std::byte{0}) throw std::runtime_error("the heap is not clear");
      }
    } catch (const Error& error) {
      met = error.what();
    }
    executor->destroy_stream(stream);
    bootstrap.barrier();
    heap->unmap_peers();
    bootstrap.barrier();
    if (!met.empty()) throw std::runtime_error(met);
  });
}

TEST(LineCheck, LinesThatArriveWhole) {
  for (const std::string& met : check_lines_with(-1, nullptr, patience())) EXPECT_EQ(met, "");
}

TEST(LineCheck, ATornLineIsAnErrorOnEveryRank) {
  const std::vector<std::string> met = check_lines_with(1, &deep_ep::host::launch_defect_torn_lines, patience());
  for (const int rank : {0, 2}) {
    const std::string& error = met[static_cast<std::size_t>(rank)];
    EXPECT_NE(error.find("lines of 128 bytes that rank 1 stores do not arrive whole in the memory of rank " +
                         std::to_string(rank) + " (1 of 20)"),
              std::string::npos)
        << error;
    EXPECT_NE(error.find("DEEP_EP_MNNVL=off"), std::string::npos) << error;
  }
  EXPECT_EQ(met[1].find("trying whether lines of 128 bytes arrive whole failed on rank 0: "), 0u) << met[1];
}

TEST(LineCheck, LinesThatDoNotComeAreWaitedForUntilTheDeadline) {
  const std::vector<std::string> met = check_lines_with(1, &deep_ep::host::launch_defect_no_lines, scaled(1));
  for (const int rank : {0, 2}) {
    const std::string& error = met[static_cast<std::size_t>(rank)];
    EXPECT_EQ(error.find("rank " + std::to_string(rank) + " waited "), 0u) << error;
    EXPECT_NE(error.find("for lines of 128 bytes that rank 1 stores"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace deep_ep::test
