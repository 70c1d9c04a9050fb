// Replicas of experts: weights pushed, gradients pulled, bit for bit against plain loops.
#include <algorithm>

#include "tests/buffer/load_balance/load_balance_case.hpp"
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/recording_executor.hpp"

namespace deep_ep::test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

class LoadBalanceTest : public ClusterTest {
 protected:
  /// Both calls, several times in turn, with other mappings each time.
  static void run(const ClusterOptions& options, const LoadBalanceShape& shape, int rounds = 3, int num_sms = 0) {
    run_with_buffers(options, {.heap_bytes = 32 * kMiB}, [&](Rank& rank, Buffer& buffer) {
      LoadBalanceRank side(rank, buffer, shape);
      for (int round = 0; round < rounds; ++round) {
        LoadBalanceShape of_round = shape;
        of_round.seed = shape.seed * 100 + static_cast<std::uint64_t>(round);
        const LoadBalanceCase one = make_load_balance_case(of_round);
        side.prefetch(one, num_sms);
        side.reduce(one, num_sms);
        rank.release();
      }
    });
  }
};
DEEP_EP_ON_THREADS(LoadBalanceTest);

TEST_P(LoadBalanceTest, RandomMappings) {
  run(cluster(1), {.ranks = 1, .slots = 5, .bytes = {20000, 64}, .seed = 7});
  run(cluster(2), {.bytes = {70000, 4096, 32}});
  run(cluster(3), {.ranks = 3, .slots = 7, .local_experts = 2, .bytes = {8240, 12288 + 16, 16}, .seed = 2});
  run(cluster(4), {.ranks = 4, .slots = 3, .local_experts = 5, .bytes = {48, 64}, .empty = 0.6, .seed = 3});
}

TEST_P(LoadBalanceTest, ManySlots) {
  // Rows of the mapping end within a warp, an expert has replicas in many slots, and some have none.
  run(cluster(3), {.ranks = 3, .slots = 45, .local_experts = 2, .bytes = {5008}, .seed = 4});
  run(cluster(2), {.slots = 33, .local_experts = 40, .bytes = {160, 16}, .only_first_owner = true, .seed = 5});
}

TEST_P(LoadBalanceTest, RecordedCallsReadTheMappingOfTheirTime) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "the executor that records plays graphs on the CPU";
  const LoadBalanceShape shape{.bytes = {9000 / 16 * 16, 64}};
  run_cluster(cluster(2), [&](Rank& rank) {
    const auto executor = std::make_shared<RecordingExecutor>(rank.executor());
    Buffer buffer(rank.bootstrap(), executor, {.heap_bytes = 32 * kMiB});
    LoadBalanceRank side(rank, buffer, shape);
    LoadBalanceCase one = make_load_balance_case(shape);
    const WeightPrefetch call = side.prepare(one);
    record(rank, *executor, [&] { buffer.prefetch_weights(call, rank.call()); });
    settle(rank, buffer);
    side.check_slots(one);
    for (std::uint64_t seed = 2; seed < 5; ++seed) {
      LoadBalanceShape of_launch = shape;
      of_launch.seed = seed;
      one = make_load_balance_case(of_launch);
      rank.bootstrap()->barrier();  // all ranks have checked their slots
      side.begin(one);
      rank.write({call.redundancy_mapping, const_cast<void*>(call.redundancy_mapping.data)},
                 std::as_bytes(std::span<const std::int32_t>(one.mapping)));
      executor->replay();
      settle(rank, buffer);
      side.check_slots(one);
    }
    buffer.destroy();
  });
}

TEST_P(LoadBalanceTest, RanksThatDisagreeLearnOfIt) {
  const LoadBalanceCase one = make_load_balance_case({.ranks = 3, .bytes = {64, 64}, .empty = 1});
  for (const int difference : {0, 1, 2}) {
    run_cluster(cluster(3), [&](Rank& rank) {
      Buffer& buffer = rank.buffer();
      LoadBalanceRank side(rank, buffer, one.shape);
      const bool odd = rank.rank() == 1;
      require_mismatch(buffer, {"prefetch_weights or reduce_grads: ranks", "differ in which of the two they call"},
                       [&] {
                         if (odd && difference == 0) {
                           side.reduce(one);
                         } else {
                           WeightPrefetch call = side.begin(one);
                           const TensorView own = rank.upload(std::vector<std::byte>(64 * 3), DType::uint8, {3, 64});
                           call.expert_weights = {own, own};
                           if (odd && difference == 1) {
                             std::swap(call.redundant_expert_weights[0], call.redundant_expert_weights[1]);
                           }
                           if (odd && difference == 2) {
                             call.redundant_expert_weights.pop_back();
                             call.expert_weights.pop_back();
                           }
                           buffer.prefetch_weights(call, rank.call());
                         }
                       });
    });
  }
}

TEST_P(LoadBalanceTest, WrongArgumentsAreNamed) {
  const LoadBalanceCase one = make_load_balance_case({.ranks = 1, .bytes = {64}, .empty = 1});
  run_with_buffers(cluster(1), [&](Rank& rank, Buffer& buffer) {
    LoadBalanceRank side(rank, buffer, one.shape);
    const TensorView own = rank.upload(std::vector<std::byte>(64 * 3), DType::uint8, {3, 64});
    const TensorView outside = rank.upload(std::vector<std::byte>(64 * 4), DType::uint8, {4, 64});
    const TensorView wide = rank.upload(std::vector<std::byte>(80 * 3), DType::uint8, {3, 80});
    const auto refused = [&](const std::vector<std::string>& words, auto&& spoil) {
      WeightPrefetch call = side.begin(one);
      call.expert_weights = {own};
      spoil(call);
      require_throws<InvalidArgument>([&] { buffer.prefetch_weights(call, rank.call()); }, words, words.front());
    };
    refused({"redundant_expert_weights has 1 tensors and expert_weights 0, allowed: equally many, 1 to 16"},
            [](WeightPrefetch& call) { call.expert_weights.clear(); });
    refused({"redundant_expert_weights[0] does not lie in the heap"},
            [&](WeightPrefetch& call) { call.redundant_expert_weights = {outside}; });
    refused({"expert_weights[0] has 80 bytes for an expert, allowed: the 64 of a slot of redundant_expert_weights[0]"},
            [&](WeightPrefetch& call) { call.expert_weights = {wide}; });
    refused({"redundancy_mapping has dtype uint8"}, [&](WeightPrefetch& call) { call.redundancy_mapping = own; });
    refused({"num_sms is -1"}, [](WeightPrefetch& call) { call.num_sms = -1; });
    GradReduction grads;
    grads.redundant_expert_grads = side.slots(0).view();
    grads.redundancy_mapping = side.begin(one).redundancy_mapping;
    grads.expert_grads = own;
    for (const DType dtype : {DType::uint8, DType::int32}) {
      grads.redundant_expert_grads.dtype = dtype;
      require_throws<InvalidArgument>([&] { buffer.reduce_grads(grads, rank.call()); },
                                      {std::string("redundant_expert_grads has dtype ") + name_of(dtype), "float32"},
                                      "reduce_grads");
    }
  });
}

/// Each has mappings of its own, and makes more calls than the one before.
TEST_P(LoadBalanceTest, NodesCallByThemselves) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "two nodes on one host are played on the CPU";
  run_with_buffers(cluster(4), {.heap_bytes = 32 * kMiB, .ranks_per_node = 2}, [&](Rank& rank, Buffer& buffer) {
    const auto node = static_cast<std::uint64_t>(rank.rank() / 2);
    LoadBalanceShape shape{.slots = 5, .bytes = {70000, 64}};
    LoadBalanceRank side(rank, buffer, shape);
    for (std::uint64_t round = 0; round < 2 + node; ++round) {
      shape.seed = 1 + 10 * node + round;
      const LoadBalanceCase one = make_load_balance_case(shape);
      side.prefetch(one);
      side.reduce(one);
      rank.release();
    }
    WeightPrefetch call = side.prepare(make_load_balance_case(shape));
    call.redundancy_mapping = rank.upload(std::vector<std::int32_t>(20, -1), DType::int32, {4, 5});
    require_throws<InvalidArgument>([&] { buffer.prefetch_weights(call, rank.call()); },
                                    {"redundancy_mapping", "its shape must be [2, any]"}, "the mapping of all nodes");
  });
}

TEST_P(LoadBalanceTest, ARankOfAnotherNodeThatDoesNotComeIsNamed) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "two nodes on one host are played on the CPU";
  const LoadBalanceCase one = make_load_balance_case({.bytes = {64}});
  run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = 32 * kMiB, .timeout_s = short_deadline(), .ranks_per_node = 2});
    LoadBalanceRank side(rank, buffer, one.shape);
    const auto call = [&] {
      buffer.prefetch_weights(side.prepare(one), rank.call());
      buffer.check();
    };
    if (rank.rank() == 2) {
      require_throws<TimeoutError>(
          call, {"rank 2 waited", "for rank 3", "its arrival at the call (prefetch_weights or reduce_grads)"},
          "prefetch_weights");
    }
    rank.bootstrap()->barrier();
  });
}

/// Ranks come at all kinds of times, overwrite their slots just before a call and use them just after it.
TEST_P(LoadBalanceTest, EveryScheduleGivesTheSame) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "schedules are the CPU executor's";
  under_schedules({.usually = 12, .sanitized = 3}, [&](std::uint64_t seed) {
    ClusterOptions options = cluster(3);
    options.host = {
        .multiprocessors = 2, .warps_per_block = 2, .seed = seed, .max_shared_bytes = std::size_t{16} << 10};
    run(options, {.ranks = 3, .slots = 3, .local_experts = 2, .bytes = {6016, 48}, .seed = seed}, 4);
  });
}

}  // namespace
}  // namespace deep_ep::test
