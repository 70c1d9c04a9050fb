#include "tests/faults/soak.hpp"

#include <chrono>
#include <cstdio>

#include "tests/cluster/exchange.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/faults/campaign.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::faults {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 4;
constexpr int kRoundsOfABuffer = 40;
constexpr long kMostGrowth_kib = 16 * 1024;  ///< of resident memory, after the first tenth of the time

/// One buffer's life: rounds of normal mode and of low-latency mode, all results checked.
void run_buffer(std::uint64_t seed) {
  static constexpr test::Topology kTopologies[] = {test::Topology::one_node, test::Topology::only_rdma,
                                                   test::Topology::two_nodes, test::Topology::rails};
  oracle::Random random(seed);
  Plan plan{.seed = seed, .ranks = kRanks, .topology = random.pick(kTopologies)};
  const Data data = make_data(plan);
  test::ClusterOptions cluster{.ranks = kRanks, .where = {.topology = plan.topology}, .host = {.multiprocessors = 2}};
  test::run_cluster(cluster, [&](test::Rank& rank) {
    Buffer& buffer = rank.buffer(test::low_latency_options(kRanks, 8, 256));
    for (int round = 0; round < kRoundsOfABuffer; ++round) {
      const auto i = static_cast<std::size_t>(round % 2);
      if (plan.topology != test::Topology::only_rdma) {
        run_round(rank, buffer, data.normal[i], {.config = {}, .returned_in_heap = round % 4 < 2});
      }
      const test::LowLatencyCombineCase& one = data.low_latency[i];
      const LowLatencyHandle handle = dispatch_and_check(rank, buffer, one.before).handle;
      const LowLatencyCombineResult result = buffer.low_latency_combine(upload_combine(rank, one, handle), rank.call());
      check_low_latency_combine(rank, one, one.expected(), result.combined_x.view());
      rank.release();
    }
    buffer.destroy();
  });
}

}  // namespace

int soak(double minutes) {
  const auto begin = Clock::now();
  const auto minutes_so_far = [&] { return std::chrono::duration<double>(Clock::now() - begin).count() / 60; };
  Holdings settled;
  Holdings now;
  long buffers = 0;
  double shown = 0;
  std::printf(
      "| minutes | rounds | resident MiB | threads | file descriptors | heaps |\n| --- | --- | --- | --- | --- | --- "
      "|\n");
  do {
    try {
      run_buffer(static_cast<std::uint64_t>(++buffers));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "soak: buffer %ld: %s\n", buffers, error.what());
      return 1;
    }
    now = Holdings::now();
    if (settled.threads == 0 && minutes_so_far() >= minutes / 10) settled = now;
    if (minutes_so_far() < shown && minutes_so_far() < minutes) continue;
    shown += minutes / 20;
    std::printf("| %.1f | %ld | %.1f | %ld | %ld | %ld |\n", minutes_so_far(), buffers * kRoundsOfABuffer,
                static_cast<double>(now.resident_kib) / 1024, now.threads, now.files, now.heaps);
    std::fflush(stdout);
  } while (minutes_so_far() < minutes);
  const std::string more = now.more_than(settled);
  const long growth = now.resident_kib - settled.resident_kib;
  const bool flat = more.empty() && growth <= kMostGrowth_kib;
  std::printf("%s: %s%ld KiB more resident memory than after a tenth of the time (at most %ld are allowed)\n",
              flat ? "flat" : "NOT FLAT", more.c_str(), growth, kMostGrowth_kib);
  return flat ? 0 : 1;
}

}  // namespace deep_ep::faults
