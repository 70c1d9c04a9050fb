// The NIC that a kernel plays, on the CPU and, where there is one, on GPUs. Longer runs on GPUs:
//   DEEP_EP_TEST_SIMULATED_OPERATIONS=10000000 DEEP_EP_TEST_SIMULATED_ROUNDS=100000000 (of data and a flag)
//   DEEP_EP_TEST_SIMULATED_PAIRS=8 (queue pairs to each rank that send) deep_ep_rdma_tests --gtest_filter='*Simulated*'
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "csrc/rdma/ring/failure.hpp"
#include "csrc/support/deadline.hpp"
#include "simulation/nic_test/nic_test.hpp"
#include "simulation/simulated_ends.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/member.hpp"
#include "tests/support/setting.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

std::uint64_t number(const char* variable, std::uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 0);
}

enum class SimulatedOn { cpu, gpu };

class SimulatedWire : public testing::TestWithParam<SimulatedOn> {
 protected:
  void SetUp() override {
    if (gpu() && cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  }

  static bool gpu() { return GetParam() == SimulatedOn::gpu; }
  static std::shared_ptr<Executor> executor(int rank, std::uint64_t seed) {
    return gpu() ? make_cuda_executor(rank % cuda_device_count()) : make_host_executor({.seed = seed});
  }
  static int pairs() { return static_cast<int>(number("DEEP_EP_TEST_SIMULATED_PAIRS", gpu() ? 8 : 1)); }

  /// Rows of all lengths, each epoch's behind one another, and a flag behind them.
  static void run(int epochs, const std::string& wire, int ranks = 2, std::uint64_t seed = 0) {
    const Setting setting("DEEP_EP_RDMA_WIRE", wire);
    expect_ranks_succeed(ranks, [&](const auto& bootstrap) {
      const int rank = bootstrap->rank();
      Member member(bootstrap, executor(rank, seed == 0 ? 0 : seed + static_cast<std::uint64_t>(rank)), patience(),
                    {.seed = seed + 1});
      member.connect({.peers = member.nodes(1).reached_by_rdma(true), .depth = 128});
      member.exchange_rows(0, epochs);
      if (!member.connections->drain(patience())) throw std::runtime_error("not idle at the end");
      bootstrap->barrier();
    });
  }
  /// Data and a flag between two ranks, and back; the seconds that it took.
  static double run_litmus(std::uint64_t rounds, const std::string& wire, int pairs) {
    double seconds = 0;
    expect_ranks_succeed(2, [&](const auto& bootstrap) {
      const std::shared_ptr<Executor> here = executor(bootstrap->rank(), 0);
      rdma::nic_test::Bench bench(*bootstrap, here);
      const auto make = [&](rdma::NicHandler, const SymmetricHeap& heap, const rdma::ConnectionOptions& options) {
        return rdma::make_simulated_ends(here, heap, options, rdma::parse_wire(wire).nic);
      };
      bench.connect(rdma::NicHandler::gpu, make, pairs);
      const rdma::nic_test::Run run = bench.run({.what = nic_test::kLitmus,
                                                 .pairs = pairs,
                                                 .operations = rounds,
                                                 .seconds = long_patience(),
                                                 .wait_s = patience()});
      if (run.fault) throw std::runtime_error(rdma::describe_fault(run.rank, *run.fault) + "; " + run.health);
      if (run.wrong) throw std::runtime_error("a flag was seen before its data");
      if (bootstrap->rank() == 0) seconds = run.seconds;
      bootstrap->barrier();
    });
    return seconds;
  }
};
INSTANTIATE_TEST_SUITE_P(, SimulatedWire, testing::Values(SimulatedOn::cpu, SimulatedOn::gpu),
                         [](const auto& info) { return info.param == SimulatedOn::cpu ? "Cpu" : "Gpu"; });

TEST_P(SimulatedWire, DisorderAndDelaysAreAllowed) {
  const int rounds = gpu() ? 2000 : 20;
  run(rounds, "simulated:rate=5,latency=10,reorder=20,completion=30");
  run_litmus(static_cast<std::uint64_t>(rounds), "simulated:reorder=20,completion=20", pairs());
  run(rounds, "simulated:latency=5", 3);
}

TEST_P(SimulatedWire, FlagsNeverOvertakeData) {
  const std::uint64_t all = number("DEEP_EP_TEST_SIMULATED_ROUNDS", gpu() ? 1000000 : under_sanitizer() ? 100 : 500);
  const std::uint64_t rounds = 1 + all / (2 * static_cast<std::uint64_t>(pairs()));
  const double seconds = run_litmus(rounds, "simulated:rate=0,latency=0", pairs());
  std::printf("%llu rounds in %.2f s\n",
              static_cast<unsigned long long>(rounds * 2 * static_cast<std::uint64_t>(pairs())), seconds);
}

TEST_P(SimulatedWire, UnderManySchedules) {
  if (gpu()) GTEST_SKIP() << "a GPU has no seed";
  for (std::uint64_t seed = 10; seed < (under_sanitizer() ? 40u : 100u) && !HasFailure(); seed += 10) {
    run(8, "simulated:reorder=3,completion=3", 2, seed);
  }
}

TEST_P(SimulatedWire, TakesAsLongAsItWasTold) {
  for (const double latency_us : {0.0, 3.0, 5.0, 8.0, 10.0, 12.0, 20.0, 50.0, 50000.0}) {
    // The CPU itself takes milliseconds when other threads want it, too.
    const std::uint64_t rounds = gpu() ? 2000 : latency_us < 1000 ? 20 : 4;
    const bool of_gpus_alone = latency_us > 5 && latency_us < 1000;
    if (of_gpus_alone != gpu() && latency_us > 5) continue;
    const std::string wire = "simulated:rate=0,latency=" + std::to_string(latency_us);
    const double one_way_us = run_litmus(rounds, wire, 1) / static_cast<double>(2 * rounds) * 1e6;
    std::printf("%s: %.2f us one way\n", wire.c_str(), one_way_us);
    EXPECT_GT(one_way_us, latency_us) << "never sooner";
  }
}

TEST_P(SimulatedWire, PassesTheNicTest) {
  for (const double multiprocessors : {1.0, 2.0}) {
    // Where rates are measured, messages overwrite each other, and several warps move them in no order.
    if (multiprocessors > 1 && under_thread_sanitizer()) continue;
    const std::shared_ptr<Executor> here = executor(0, 0);
    const auto make = [&](rdma::NicHandler, const SymmetricHeap& heap, const rdma::ConnectionOptions& options) {
      return rdma::make_simulated_ends(here, heap, options, {.multiprocessors = multiprocessors});
    };
    const rdma::nic_test::Subject subject{.name = "simulated",
                                          .executor = here,
                                          .make = make,
                                          .others = {},
                                          .no_others = "none",
                                          .wants_gpu_handler = true};
    const rdma::nic_test::Limits limits{.wait_s = patience(),
                                        .entries = gpu() ? 70000u : 2000u,
                                        .entries_s = scaled(10),
                                        .phase_s = gpu() ? 0.3 : 0.02};
    for (const auto& [check, outcome, found, meaning, action] :
         rdma::nic_test::test_nic(*make_thread_bootstraps(1).front(), subject, limits)) {
      std::printf("%s: %s\n", check.c_str(), found.c_str());
      // Skipped: other ways, of which there are none, and too few entries to wrap.
      const bool may_be_skipped = check == "way" || found.find("all data is right") != std::string::npos;
      EXPECT_TRUE(outcome == rdma::nic_test::Outcome::pass ||
                  (may_be_skipped && outcome == rdma::nic_test::Outcome::skip))
          << check << ": " << found;
    }
  }
}

TEST_P(SimulatedWire, LongMessagesByTwoBlocks) {
  const std::uint64_t operations = number("DEEP_EP_TEST_SIMULATED_OPERATIONS", gpu()               ? 1000000
                                                                               : under_sanitizer() ? 2000
                                                                                                   : 6400);
  const int epochs = 1 + static_cast<int>(operations) / (2 * ExchangeRows{}.count);
  for (const char* const wire : {"simulated:sms=2", "simulated:sms=2,rate=0,latency=0,reorder=5", "simulated:sms=1"}) {
    SCOPED_TRACE(wire);
    run(epochs, wire);
    if (under_sanitizer()) break;  // one of them sees as much
  }
}

}  // namespace
}  // namespace deep_ep::test
