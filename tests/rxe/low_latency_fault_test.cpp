// A rank of low-latency calls over RoCE devices dies. In a program of its own: it forks processes, so nothing in it may
// have started threads before.
#include <gtest/gtest.h>
#include <signal.h>

#include <functional>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/cluster/low_latency_case.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/support/setting.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRanks = 3;
constexpr int kDead = 2;

LowLatencyCase three_ranks() {
  return make_low_latency_case({.tokens = {4, 3, 5}, .max_tokens = 5, .hidden = 256, .seed = 7});
}

LowLatencyCase without_the_dead() {
  oracle::Masks masks(kRanks * kRanks, 0);
  for (int rank = 0; rank < kDead; ++rank) masks[static_cast<std::size_t>(rank) * kRanks + kDead] = 1;
  return with_masks(three_ranks(), masks);
}

/// All ranks make a call, then one dies, then the others go on with `afterwards`. Whatever they throw fails the test.
void lose_a_rank(bool masking, const std::function<void(Rank&, Buffer&)>& afterwards) {
  const std::vector<std::string> errors = run_rank_processes(kRanks, [&](const auto& bootstrap) {
    const int r = bootstrap->rank();
    const ClusterOptions cluster{
        .ranks = kRanks, .where = {}, .host = {.multiprocessors = 2}, .timeout_s = long_patience()};
    Rank rank(r, cluster, bootstrap, make_host_executor(cluster.host));
    BufferOptions options = low_latency_options(kRanks, 5, 256);
    options.low_latency.masking = masking;
    options.timeout_s = scaled(6);
    Buffer& buffer = rank.buffer(options);
    dispatch_and_check(rank, buffer, three_ranks());
    bootstrap->barrier();
    if (r == kDead) ::raise(SIGKILL);
    afterwards(rank, buffer);
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1], "");
  EXPECT_NE(errors[kDead], "");
}

class RxeLowLatencyFault : public testing::Test {
  Setting wire_{"DEEP_EP_RDMA_WIRE", "verbs"};
  Setting ack_timeout_{"DEEP_EP_RDMA_ACK_TIMEOUT", "16"};
  Setting retry_count_{"DEEP_EP_RDMA_RETRY_COUNT", "6"};
  Setting nodes_{"DEEP_EP_RANKS_PER_NODE", "1"};
};

TEST_F(RxeLowLatencyFault, ADeadRankIsMasked) {
  lose_a_rank(true, [](Rank& rank, Buffer& buffer) {
    for (int i = 0; i < 3; ++i) dispatch_and_check(rank, buffer, without_the_dead());
    const TensorView status = rank.upload(std::vector<std::int32_t>(kRanks, -7), DType::int32, {kRanks});
    buffer.low_latency_query_mask(status, rank.call().stream);
    require_same({0, 0, 1}, rank.download<std::int32_t>(status), "masked");
  });
}

TEST_F(RxeLowLatencyFault, WithoutMasksItIsAnErrorThatNamesTheRank) {
  lose_a_rank(false, [](Rank& rank, Buffer& buffer) {
    const LowLatencyCase one = three_ranks();
    buffer.low_latency_dispatch(upload_arguments(rank, one), rank.call());
    require_throws<Error>([&] { buffer.check(); }, {"rank 2"}, "a rank that is dead");
    require_throws<Error>([&] { buffer.low_latency_dispatch(upload_arguments(rank, one), rank.call()); }, {"rank 2"},
                          "every later call");
  });
}

}  // namespace
}  // namespace deep_ep::test
