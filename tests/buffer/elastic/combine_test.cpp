// Combine of the second interface where ranks or arguments are wrong, and its barrier.
#include <atomic>
#include <functional>

#include "tests/buffer/elastic/combine_case.hpp"
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/launches_executor.hpp"
#include "tests/support/bytes.hpp"

namespace deep_ep::test {
namespace {

class ElasticCombineTest : public ClusterTest {};
DEEP_EP_ON_THREADS(ElasticCombineTest);

ElasticCase expanded_case(const Shape& shape, bool weights = false) {
  return make_elastic_case(make_case(shape), {.expand = true, .combine_weights = weights});
}

/// Combines the rows of a dispatch of 8 tokens and top-2, with arguments as `change` leaves them: no token has a sum.
void expect_no_sums(const ClusterOptions& cluster,
                    const std::function<void(Rank&, const ElasticDispatchHandle&, ElasticCombineArguments&)>& change) {
  ElasticCase one = expanded_case({.tokens = {8}, .topk = 2});
  std::ranges::fill(one.sides[0].sums, std::uint16_t{0});
  run_with_buffers(cluster, [&](Rank& rank, Buffer& buffer) {
    ElasticDispatchResult result;
    ElasticCombineArguments call = dispatch_for_combine(rank, buffer, one, result);
    change(rank, result.handle, call);
    check_elastic(rank, one, buffer.combine_elastic(call, rank.call()));
  });
}

TEST_P(ElasticCombineTest, ATableOfAnotherDispatchNamesNoRows) {
  // Of rows on this rank: tokens do not get those of others.
  expect_no_sums(cluster(1), [](Rank& rank, const ElasticDispatchHandle& handle, ElasticCombineArguments& call) {
    auto rows = rank.download<std::int32_t>(handle.own_rows.view());
    for (std::int32_t& row : rows) row = row == 0 ? INT32_MAX : row < 0 ? row : row - 1;
    call.own_rows = rank.upload(rows, DType::int32, {8, 2});
  });
}

TEST_P(ElasticCombineTest, TokensThatSelectNothingAnyMoreHaveNoSum) {
  expect_no_sums(cluster(1), [](Rank& rank, const ElasticDispatchHandle&, ElasticCombineArguments& call) {
    call.topk_idx = rank.upload(std::vector<std::int64_t>(16, -1), DType::int64, {8, 2});
  });
}

TEST_P(ElasticCombineTest, RanksThatDisagreeLearnOfIt) {
  const Shape shape{.tokens = {5, 6}};
  Shape wide = shape;
  wide.combine_hidden = 80;
  const ElasticCase without = expanded_case(shape), with = expanded_case(shape, true), wider = expanded_case(wide);
  for (const auto& [other, words] :
       {std::pair{
            &with,
            "combine: kind (1 with weights, plus 2 with one rounding for all rows; of a dispatch 1 with a handle) is"},
        {&wider, "combine: bytes of a row of x is"},
        {&without, "combine: maximum of tokens of a rank is"}}) {
    run_cluster(cluster(2), [&](Rank& rank) {
      Buffer& buffer = rank.buffer();
      ElasticDispatchResult result;
      ElasticCombineArguments call = dispatch_for_combine(rank, buffer, rank.rank() == 0 ? without : *other, result);
      if (rank.rank() == 1 && other == &without) ++call.max_tokens;
      require_mismatch(buffer, {words}, [&] { buffer.combine_elastic(call, rank.call()); });
    });
  }
}

/// A warp of combine finds no rows in the metadata, so that its share of each row is never stored.
class MissingShareExecutor final : public LaunchesExecutor {
 public:
  using LaunchesExecutor::LaunchesExecutor;

 private:
  struct Wrapped {
    host_machine::KernelLaunch kernel;
    ElasticCombineParams without_rows;
    std::vector<std::int32_t> nothing = std::vector<std::int32_t>(RowMetadata::kColumnsBefore + kMaxTopk, -1);
  };

  void launch(host_machine::KernelLaunch kernel, StreamHandle stream) override {
    if (kernel.name == std::string_view("combine_elastic")) {
      auto wrapped =
          std::make_shared<Wrapped>(Wrapped{kernel, *static_cast<const ElasticCombineParams*>(kernel.params.get())});
      wrapped->without_rows.metadata.data = wrapped->nothing.data();
      wrapped->without_rows.metadata.stride = 0;
      kernel.params = std::move(wrapped);
      kernel.entry = &run;
    }
    host_machine::enqueue(std::move(kernel), stream);
  }
  static void run(const void* params, std::byte* memory) {
    const auto& one = *static_cast<const Wrapped*>(params);
    const bool missing = host_machine::current_thread->thread / 32 == 1;
    one.kernel.entry(missing ? &one.without_rows : one.kernel.params.get(), memory);
  }
};

TEST_P(ElasticCombineTest, ARowIsThereWhenAllItsSharesAre) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "a warp of the CPU executor";
  ElasticCase one;
  for (std::uint64_t seed = 1;; ++seed) {  // rank 1 has a row of the only token
    one = expanded_case({.tokens = {1, 0}, .combine_hidden = 1032, .seed = seed});
    if (std::ranges::any_of(one.sides[1].slots, [](std::int32_t slot) { return slot >= 0; })) break;
  }
  ClusterOptions options = cluster_with_absentees(2);
  options.host.warps_per_block = 8;
  run_cluster(options, [&](Rank& rank) {
    Buffer buffer(rank.bootstrap(), std::make_shared<MissingShareExecutor>(rank.executor()),
                  {.heap_bytes = 16 * kMiB, .timeout_s = short_deadline()});
    ElasticDispatchResult result;
    ElasticCombineArguments call = dispatch_for_combine(rank, buffer, one, result);
    call.num_sms = 1;
    const auto combine = [&] {
      buffer.combine_elastic(call, rank.call());
      rank.executor()->synchronize(rank.stream());
      buffer.check();
    };
    if (rank.rank() == 0) {
      require_throws<TimeoutError>(combine, {"rank 0 waited", "for rank 1", "a pushed row (combine kernel)"},
                                   "a row without a share");
    } else {
      combine();
    }
    rank.bootstrap()->barrier();
  });
}

TEST_P(ElasticCombineTest, WrongArgumentsAreNamed) {
  const ElasticCase one = expanded_case({.tokens = {5}});
  run_with_buffers(cluster(1), [&](Rank& rank, Buffer& buffer) {
    ElasticDispatchResult result;
    const ElasticCombineArguments good = dispatch_for_combine(rank, buffer, one, result);
    const auto refused = [&](const std::vector<std::string>& words, auto&& spoil) {
      ElasticCombineArguments call = good;
      spoil(call);
      require_throws<InvalidArgument>([&] { buffer.combine_elastic(call, rank.call()); }, words, words.front());
    };
    refused({"number of tokens in topk_idx is 5"}, [](auto& call) { call.max_tokens = 4; });
    refused({"num_experts is 0"}, [](auto& call) { call.num_experts = 0; });
    refused({"x has", "rows, allowed"}, [](auto& call) { call.expanded = false; });
    refused({"each_selection is true"}, [&](auto& call) {
      call.x = rank.upload(std::vector<std::uint16_t>(std::size_t(call.metadata.size(0)) * 64), DType::bfloat16,
                           {call.metadata.size(0), 64});
      call.expanded = false;
      call.each_selection = true;
    });
    refused({"topk_weights is given"}, [](auto& call) {
      call.each_selection = true;
      call.topk_weights = call.x;
    });
    refused({"topk_weights has dtype"}, [](auto& call) { call.topk_weights = call.x; });
    refused({"bias_1 has dtype"}, [](auto& call) { call.bias_1 = call.topk_idx; });
  });
}

class ElasticBarrierTest : public ClusterTest {};
DEEP_EP_ON_THREADS(ElasticBarrierTest);

TEST_P(ElasticBarrierTest, NobodyPassesBeforeAllHaveCome) {
  if (are_processes(GetParam())) GTEST_SKIP() << "ranks share a counter";
  for (const int ranks_per_node : {3, 1}) {
    std::atomic<int> came = 0;
    run_with_buffers(cluster(3), {.heap_bytes = 16 * kMiB, .ranks_per_node = ranks_per_node},
                     [&](Rank& rank, Buffer& buffer) {
                       for (int round = 1; round <= 50; ++round) {
                         ++came;
                         buffer.barrier(rank.call());
                         buffer.check();
                         require(came >= 3 * round, "a rank has passed barrier " + std::to_string(round) + " alone");
                       }
                     });
  }
}

TEST_P(ElasticBarrierTest, ARankThatDoesNotComeIsNamed) {
  for (const int ranks_per_node : {2, 1}) {
    run_cluster(cluster_with_absentees(2), [&](Rank& rank) {
      Buffer& buffer =
          rank.buffer({.heap_bytes = 16 * kMiB, .timeout_s = short_deadline(), .ranks_per_node = ranks_per_node});
      if (rank.rank() == 0) {
        require_throws<TimeoutError>(
            [&] {
              buffer.barrier(rank.call());
              buffer.check();
            },
            {"rank 0 waited", "for rank 1", ranks_per_node == 2 ? "its arrival at the barrier" : "its token counts"},
            "barrier");
      }
      rank.bootstrap()->barrier();
    });
  }
}

}  // namespace
}  // namespace deep_ep::test
