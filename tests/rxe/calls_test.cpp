// Calls of both modes whose ranks reach each other through RoCE devices.
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/cluster/cluster.hpp"
#include "tests/cluster/exchange.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/support/setting.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

constexpr std::int64_t kTokens = 6;
constexpr std::int64_t kHidden = 512;

Rank make_rank(const std::shared_ptr<Bootstrap>& bootstrap) {
  const ClusterOptions options{
      .ranks = bootstrap->size(), .where = {}, .host = {.multiprocessors = 2}, .timeout_s = long_patience()};
  return {bootstrap->rank(), options, bootstrap, make_host_executor(options.host)};
}

/// Tokens of each rank; rank 1 has none.
std::vector<std::int64_t> tokens_of(int ranks, std::int64_t first, std::int64_t step) {
  std::vector<std::int64_t> tokens;
  for (int rank = 0; rank < ranks; ++rank) tokens.push_back(rank == 1 ? 0 : first + step * rank);
  return tokens;
}

/// `rails_of`: ranks of a node, where rows go by rails; else 0.
void run_low_latency_calls(const std::shared_ptr<Bootstrap>& bootstrap, int rails_of = 0) {
  Rank rank = make_rank(bootstrap);
  BufferOptions buffer_options = low_latency_options(rank.size(), kTokens, kHidden);
  // Left to the library, a slow device would have rails.
  if (rails_of == 0) buffer_options.low_latency.rails = LowLatencyRails::never;
  Buffer& buffer = rank.buffer(buffer_options);
  const std::vector<std::int64_t> tokens = tokens_of(rank.size(), kTokens, -1);
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    const LowLatencyCase fp8 =
        make_low_latency_case({.tokens = tokens, .max_tokens = kTokens, .hidden = kHidden, .seed = seed});
    const LowLatencyDispatchResult result = buffer.low_latency_dispatch(upload_arguments(rank, fp8), rank.call());
    check_low_latency_dispatch(rank, fp8, result);
    LowLatencyCombineCase one = make_low_latency_combine_case({.tokens = tokens,
                                                               .max_tokens = kTokens,
                                                               .hidden = kHidden,
                                                               .routing = oracle::Routing::some_dropped,
                                                               .seed = seed + 10});
    one.options.ranks_per_node = rank.size() / 2;  // by which ranks are added, by rails and without them
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
    const LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
    const auto expected = one.expected();
    for (int again = 0; again < 2; ++again) {
      const Tensor combined = buffer.low_latency_combine(arguments, rank.call()).combined_x;
      check_low_latency_combine(rank, one, expected, combined.view());
    }
    buffer.low_latency_clean(rank.call().stream);
    rank.release();
  }
  buffer.check();
  buffer.destroy();
}

/// Between nodes of two ranks, through rings so small that they wrap.
void run_normal_mode(const std::shared_ptr<Bootstrap>& bootstrap) {
  Rank rank = make_rank(bootstrap);
  Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{16} << 20, .window_bytes = std::size_t{96} << 10});
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    const Case one = make_case({.tokens = tokens_of(rank.size(), 40, 1),
                                .routing = oracle::Routing::some_dropped,
                                .hidden = 256,
                                .combine_hidden = 256,
                                .bias_0 = true,
                                .ranks_per_node = 2,
                                .seed = seed});
    run_round(rank, buffer, one, {.returned_in_heap = seed != 2});
    rank.release();
  }
  buffer.check();
  buffer.destroy();
}

/// The variables of a group of ranks on soft-RoCE devices, until the end of the test. See rxe_settings.hpp.
class RxeCalls : public testing::Test {
 protected:
  /// `part` on ranks of two nodes; it must send packets.
  static void run(int ranks_per_node, const std::function<void(const std::shared_ptr<Bootstrap>&)>& part) {
    const Setting nodes("DEEP_EP_RANKS_PER_NODE", std::to_string(ranks_per_node));
    const std::int64_t before = packets();
    expect_ranks_succeed(2 * ranks_per_node, part);
    EXPECT_GT(packets(), before + 100);
  }

 private:
  /// Packets that both devices have sent.
  static std::int64_t packets() {
    std::int64_t sum = 0;
    for (const std::string device : {"rxe0", "rxe1"}) {
      std::ifstream file("/sys/class/infiniband/" + device + "/ports/1/hw_counters/sent_pkts");
      std::int64_t sent = 0;
      if (!(file >> sent)) throw std::runtime_error("no counter of " + device);
      sum += sent;
    }
    return sum;
  }

  Setting wire_{"DEEP_EP_RDMA_WIRE", "verbs"};
  Setting ack_timeout_{"DEEP_EP_RDMA_ACK_TIMEOUT", "16"};
  Setting retry_count_{"DEEP_EP_RDMA_RETRY_COUNT", "7"};
};

TEST_F(RxeCalls, LowLatencyOfTwoNodesOfOneRank) {
  run(1, [](const auto& bootstrap) { run_low_latency_calls(bootstrap); });
}

TEST_F(RxeCalls, LowLatencyOfTwoNodesOfTwoRanks) {
  run(2, [](const auto& bootstrap) { run_low_latency_calls(bootstrap); });
}

/// Of a rank of another rail the device beside it in its node receives.
TEST_F(RxeCalls, LowLatencyOfTwoNodesOfTwoRanksThatKeepToRails) {
  const Setting rail_only("DEEP_EP_RAIL_ONLY", "1");
  run(2, [](const auto& bootstrap) { run_low_latency_calls(bootstrap); });
}

TEST_F(RxeCalls, LowLatencyOfTwoNodesOfTwoRanksByRails) {
  const Setting rails("DEEP_EP_LOW_LATENCY_RAILS", "always");
  run(2, [](const auto& bootstrap) { run_low_latency_calls(bootstrap, 2); });
}

TEST_F(RxeCalls, NormalModeOfTwoNodesOfTwoRanks) { run(2, run_normal_mode); }

}  // namespace
}  // namespace deep_ep::test
