// Combine and barrier of the second interface, bit for bit against plain loops.
#include <atomic>

#include "tests/buffer/elastic/combine_case.hpp"
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/marking_executor.hpp"

namespace deep_ep::test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

class ElasticCombineTest : public ClusterTest {
 protected:
  void run(const std::vector<ElasticShape>& shapes, const BufferOptions& options = {.heap_bytes = 16 * kMiB},
           int num_sms = 0, int warps = 0) {
    std::vector<ElasticCase> cases;
    for (const ElasticShape& shape : shapes) cases.push_back(make_elastic_case(shape));
    ClusterOptions where = cluster(shapes.front().ranks());
    where.host.warps_per_block = warps;
    run_cluster(where, [&](Rank& rank) {
      // Memory that a kernel leaves alone names rows that are not there.
      Buffer buffer(rank.bootstrap(), std::make_shared<MarkingExecutor>(rank.executor()), options);
      for (const ElasticCase& one : cases) {
        ElasticCombineArguments call = upload_elastic(rank, one);
        call.num_sms = num_sms;
        check_elastic(rank, one, buffer.combine_elastic(call, rank.call()));
        rank.release();
      }
      buffer.destroy();
    });
  }
};
DEEP_EP_ON_THREADS(ElasticCombineTest);

/// With and without everything that has code of its own.
std::vector<ElasticShape> all_kinds(std::vector<std::int64_t> tokens, int topk) {
  std::vector<ElasticShape> shapes;
  for (int kind = 0; kind < 12; ++kind) {
    ElasticShape shape{.tokens = tokens, .topk = topk, .biases = kind % 4, .seed = std::uint64_t(kind) + 1};
    shape.expanded = kind % 3 != 0;
    shape.each_selection = kind % 3 == 2;
    shape.weights = !shape.each_selection && kind % 2 == 0;
    shape.gaps = shape.expanded && kind >= 6;
    shape.hidden = kind % 2 == 0 ? 72 : 1032;
    shapes.push_back(shape);
  }
  return shapes;
}

TEST_P(ElasticCombineTest, EveryKind) {
  DEEP_EP_NEEDS_RANKS(3);
  run(all_kinds({17, 0, 40}, 6));
}

TEST_P(ElasticCombineTest, MoreRanksThanSelections) {
  DEEP_EP_NEEDS_RANKS(4);
  run(all_kinds({9, 12, 0, 7}, 2));
}

TEST_P(ElasticCombineTest, BetweenNodes) {
  DEEP_EP_NEEDS_RANKS(4);
  run(all_kinds({17, 0, 40, 9}, 6), {.heap_bytes = 16 * kMiB, .ranks_per_node = 2});
}

TEST_P(ElasticCombineTest, SumsThatAreMadeLater) {
  DEEP_EP_NEEDS_RANKS(2);
  for (const int ranks_per_node : {2, 1}) {
    std::vector<ElasticCase> cases;
    for (const ElasticShape& shape : all_kinds({17, 40}, 5)) cases.push_back(make_elastic_case(shape));
    run_cluster(cluster(2), [&](Rank& rank) {
      Buffer& buffer = rank.buffer({.heap_bytes = 16 * kMiB, .ranks_per_node = ranks_per_node});
      for (const ElasticCase& one : cases) {
        const ElasticCombineArguments call = upload_elastic(rank, one);
        const ElasticReturn back = buffer.begin_combine_elastic(call, rank.call());
        buffer.barrier(rank.call());
        check_elastic(rank, one, buffer.end_combine_elastic(back, rank.call()));
        rank.release();
      }
      buffer.destroy();
    });
  }
}

TEST_P(ElasticCombineTest, ManySelectionsOfOneRank) {
  DEEP_EP_NEEDS_RANKS(2);
  run({{.tokens = {6, 8}, .local_experts = 1, .topk = 32, .hidden = 520, .biases = 3},
       {.tokens = {6, 8}, .local_experts = 1, .topk = 32, .each_selection = true, .seed = 2}});
}

TEST_P(ElasticCombineTest, WarpsShareFewRows) {
  DEEP_EP_NEEDS_RANKS(2);
  // Rows of three pieces, for teams of two, four and eight warps.
  for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{4, 3}, {2, 2}, {1, 1}}) {
    run(all_kinds(tokens, 6), {.heap_bytes = 16 * kMiB}, 1, 8);
  }
}

TEST_P(ElasticCombineTest, AWindowForAFewTokensTakesPasses) {
  DEEP_EP_NEEDS_RANKS(2);
  // Rows of 2176 bytes: room for 7 tokens of both ranks, or for 2 of six selections.
  run(all_kinds({40, 15}, 6), {.heap_bytes = 2 * kMiB, .window_bytes = std::size_t{31} << 10});
}

TEST_P(ElasticCombineTest, ATableOfAnotherDispatchNamesNoRows) {
  DEEP_EP_NEEDS_RANKS(1);
  // Of rows on this rank: tokens do not get those of others.
  ElasticCase one = make_elastic_case({.tokens = {8}, .topk = 2});
  for (std::int32_t& row : one.sides[0].rows_at_owners) row = row == 0 ? INT32_MAX : row < 0 ? row : row - 1;
  std::fill(one.sides[0].sums.begin(), one.sides[0].sums.end(), std::uint16_t{0});
  run_with_buffers(cluster(1), [&](Rank& rank, Buffer& buffer) {
    check_elastic(rank, one, buffer.combine_elastic(upload_elastic(rank, one), rank.call()));
  });
}

TEST_P(ElasticCombineTest, RanksThatDisagreeLearnOfIt) {
  DEEP_EP_NEEDS_RANKS(2);
  ElasticShape odd{.tokens = {5, 6}, .weights = true};
  const ElasticCase with = make_elastic_case(odd);
  odd.weights = false;
  const ElasticCase without = make_elastic_case(odd);
  odd.hidden = 80;
  const ElasticCase wide = make_elastic_case(odd);
  const auto longer = [](ElasticCombineArguments call) {
    ++call.max_tokens;
    return call;
  };
  for (const auto& [other, words] :
       {std::pair{
            &with,
            "combine: kind (1 with weights, plus 2 with one rounding for all rows; of a dispatch 1 with a handle) is"},
        {&wide, "combine: bytes of a row of x is"}}) {
    run_cluster(cluster(2), [&](Rank& rank) {
      Buffer& buffer = rank.buffer();
      require_mismatch(buffer, {words}, [&] {
        buffer.combine_elastic(upload_elastic(rank, rank.rank() == 0 ? without : *other), rank.call());
      });
    });
  }
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
    const ElasticCombineArguments call = upload_elastic(rank, without);
    require_mismatch(buffer, {"combine: maximum of tokens of a rank is"},
                     [&] { buffer.combine_elastic(rank.rank() == 0 ? call : longer(call), rank.call()); });
  });
}

TEST_P(ElasticCombineTest, WrongArgumentsAreNamed) {
  DEEP_EP_NEEDS_RANKS(1);
  const ElasticCase one = make_elastic_case({.tokens = {5}});
  run_with_buffers(cluster(1), [&](Rank& rank, Buffer& buffer) {
    const auto refused = [&](const std::vector<std::string>& words, auto&& spoil) {
      ElasticCombineArguments call = upload_elastic(rank, one);
      spoil(call);
      require_throws<InvalidArgument>([&] { buffer.combine_elastic(call, rank.call()); }, words, words.front());
    };
    refused({"number of tokens in topk_idx is 5"}, [](auto& call) { call.max_tokens = 4; });
    refused({"num_experts is 0"}, [](auto& call) { call.num_experts = 0; });
    refused({"x has", "rows, allowed"}, [](auto& call) { call.expanded = false; });
    refused({"each_selection is true"}, [&](auto& call) {
      call.x = rank.upload(std::vector<std::uint16_t>(std::size_t(call.metadata.size(0)) * 72), DType::bfloat16,
                           {call.metadata.size(0), 72});
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

TEST_P(ElasticCombineTest, EveryScheduleGivesTheSame) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "schedules are the CPU executor's";
  std::vector<ElasticCase> cases, few;  // few: warps share a row, and some blocks only add
  for (ElasticShape& shape : all_kinds({9, 0, 13}, 3)) {
    shape.max_tokens = 13;
    cases.push_back(make_elastic_case(shape));
    shape.tokens = {1, 0, 1};
    few.push_back(make_elastic_case(shape));
  }
  under_schedules({.usually = 10, .sanitized = 2}, [&](std::uint64_t seed) {
    ClusterOptions options = cluster(3);
    options.host = {.multiprocessors = 2, .warps_per_block = seed % 2 == 0 ? 3 : 6, .seed = seed};
    run_cluster(options, [&](Rank& rank) {
      // Room for 4 of the wide rows of each rank.
      Buffer& buffer = rank.buffer({.heap_bytes = 2 * kMiB, .window_bytes = std::size_t{26} << 10});
      for (const ElasticCase& one : cases) {
        check_elastic(rank, one, buffer.combine_elastic(upload_elastic(rank, one), rank.call()));
        buffer.barrier(rank.call());
        rank.release();
      }
      for (const ElasticCase& one : few) {
        ElasticCombineArguments call = upload_elastic(rank, one);
        call.num_sms = 1;
        check_elastic(rank, one, buffer.combine_elastic(call, rank.call()));
        rank.release();
      }
      buffer.destroy();
    });
  });
}

class ElasticBarrierTest : public ClusterTest {};
DEEP_EP_ON_THREADS(ElasticBarrierTest);

TEST_P(ElasticBarrierTest, NobodyPassesBeforeAllHaveCome) {
  DEEP_EP_NEEDS_RANKS(3);
  if (are_processes(GetParam())) GTEST_SKIP() << "ranks share a counter";
  for (const int ranks_per_node : {3, 1}) {
    std::atomic<int> came = 0;
    run_cluster(cluster(3), [&](Rank& rank) {
      Buffer& buffer = rank.buffer({.heap_bytes = 16 * kMiB, .ranks_per_node = ranks_per_node});
      for (int round = 1; round <= 50; ++round) {
        ++came;
        buffer.barrier(rank.call());
        buffer.check();
        require(came >= 3 * round, "a rank has passed barrier " + std::to_string(round) + " alone");
      }
      buffer.destroy();
    });
  }
}

TEST_P(ElasticBarrierTest, ARankThatDoesNotComeIsNamed) {
  DEEP_EP_NEEDS_RANKS(2);
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
