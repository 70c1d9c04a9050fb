// Weights that come with a dispatch: its combines add with them, and announce nothing.
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyWeightsTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyWeightsTest);

/// The rank's weights for its combine, but where an expert's rank adds up several rows, other numbers: combine has no
/// use for these.
std::vector<float> weights_of_single_rows(const LowLatencyCombineCase& one, int rank) {
  const oracle::Selection& selection = one.inputs[index(rank)].selection;
  const auto rank_of = [&](std::size_t i) {
    const std::int64_t expert = selection.idx[i];
    return expert < 0 ? -1 : expert / one.before.shape.local_experts;
  };
  std::vector<float> weights = selection.weights;
  const auto topk = index(selection.topk);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    for (std::size_t other = i / topk * topk; other < (i / topk + 1) * topk; ++other) {
      if (other != i && rank_of(other) == rank_of(i)) weights[i] = 3.0f;
    }
  }
  return weights;
}

/// Weights travel among ranks that reach each other by NVLink. Elsewhere combine takes its own, and adds as ever.
TEST_P(LowLatencyWeightsTest, RandomShapes) {
  oracle::Random random(test_seed());
  for (const int ranks : {1, 3, 4}) {
    if (!missing(GetParam(), ranks).empty()) continue;
    std::vector<LowLatencyCombineCase> cases;
    for (int i = 0; i < (under_thread_sanitizer() ? 2 : 5); ++i) {
      LowLatencyCaseShape shape = random_low_latency_shape(
          ranks, random.next(), {.tokens = 8, .many_tokens = 16, .hidden = 1024, .local_experts = 6});
      cases.push_back(make_low_latency_combine_case(shape, random.chance(0.3) ? 128 * (1 + random.below(9)) : 0));
    }
    const int width = ranks_per_node_of(GetParam().topology, ranks);
    const bool travel = ranks == 1 || GetParam().topology == Topology::one_node;
    run_with_buffers(cluster(ranks), low_latency_options(ranks, 512, 1152), [&](Rank& rank, Buffer& buffer) {
      for (std::size_t i = 0; i < 2 * cases.size(); ++i) {
        const LowLatencyCombineCase& one = cases[i / 2];
        const bool weights = i % 3 != 0;  // calls with and without them follow each other
        const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one, weights);
        require(handle.has_weights == (weights && travel), "which handles have weights");
        LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
        if (handle.has_weights) {
          const std::vector<float> others = weights_of_single_rows(one, rank.rank());
          arguments.topk_weights =
              rank.upload(others, DType::float32, {arguments.topk_weights.shape[0], arguments.topk_weights.shape[1]});
        }
        const auto result = received(buffer.low_latency_combine(with_hook(arguments, i % 2 != 0), rank.call()));
        check_low_latency_combine(rank, one, one.expected(width), result.combined_x.view());
        rank.release();
      }
      buffer.check();
    });
  }
}

LowLatencyCombineCase all_to_all() {
  return make_low_latency_combine_case(
      {.tokens = {4, 4, 4}, .max_tokens = 4, .hidden = 512, .local_experts = 2, .topk = 6});
}

TEST_P(LowLatencyWeightsTest, OfSomeRanksOnly) {
  if (GetParam().topology != Topology::one_node) GTEST_SKIP() << "weights do not travel there";
  const LowLatencyCombineCase one = all_to_all();
  expect_disagreement(cluster_with_absentees(3), low_latency_options(3, 4, 512, patience()),
                      {"low_latency_dispatch", "combine_weights"},
                      [&](Rank& rank, Buffer& buffer, bool odd) { dispatch_low_latency(rank, buffer, one, !odd); });
}

/// An owner that leaves out one of two rows of a rank gets the sum of both, which it does not take for the other one.
TEST_P(LowLatencyWeightsTest, ASumIsNotTakenForARow) {
  if (GetParam().topology != Topology::one_node) GTEST_SKIP() << "weights do not travel there";
  const LowLatencyCombineCase one =
      make_low_latency_combine_case({.tokens = {3, 3}, .max_tokens = 3, .hidden = 256, .local_experts = 2, .topk = 4});
  run_cluster(cluster_with_absentees(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(2, 3, 256, short_deadline()));
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one, true);
    LowLatencyCombineCase now = one;
    if (rank.rank() == 1) now.inputs[1].selection.idx[0] = -1;
    const auto call = [&] {
      buffer.low_latency_combine(upload_combine(rank, now, handle), rank.call());
      buffer.check(true);
    };
    if (rank.rank() == 1) {
      require_throws<TimeoutError>(call, {"a row (low-latency combine)"}, "a row that never comes");
    } else {
      try {
        call();  // it has all that it selects
      } catch (const Error&) {
        // and may have heard of rank 1's error already
      }
    }
    rank.bootstrap()->barrier();
  });
}

/// No rank waits for what the others announce, and yet each hears that they mean another dispatch.
TEST_P(LowLatencyWeightsTest, RanksThatMeanAnotherDispatch) {
  if (GetParam().topology != Topology::one_node) GTEST_SKIP() << "weights do not travel there";
  const LowLatencyCombineCase one = all_to_all();
  for (const bool hook : {false, true}) {
    expect_disagreement(cluster_with_absentees(3), low_latency_options(3, 4, 512, patience()),
                        {"low_latency_combine", "the dispatch that their handles are of"},
                        [&](Rank& rank, Buffer& buffer, bool odd) {
                          const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one, true);
                          const LowLatencyHandle other = dispatch_low_latency(rank, buffer, one, true);
                          const auto arguments = upload_combine(rank, one, odd ? other : handle);
                          received(buffer.low_latency_combine(with_hook(arguments, hook), rank.call()));
                        });
  }
}

/// Nothing is announced, so a rank that does not come is late with its rows, also where it has none.
TEST_P(LowLatencyWeightsTest, ARankThatDoesNotComeIsLateWithRows) {
  if (GetParam().topology != Topology::one_node) GTEST_SKIP() << "weights do not travel there";
  const LowLatencyCombineCase one = make_low_latency_combine_case({.tokens = {0, 4}, .max_tokens = 4, .hidden = 512});
  run_cluster(cluster_with_absentees(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(2, 4, 512, short_deadline()));
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one, true);
    buffer.check(true);
    rank.bootstrap()->barrier();
    if (rank.rank() == 0) {
      const auto call = [&] {
        buffer.low_latency_combine(upload_combine(rank, one, handle), rank.call());
        buffer.check(true);
      };
      require_throws<TimeoutError>(call, {"rank 1", "a row (low-latency combine)"}, "combine without rank 1");
    }
    rank.bootstrap()->barrier();
  });
}

TEST_P(LowLatencyWeightsTest, ArgumentsThatAreRefused) {
  const LowLatencyCombineCase one = make_low_latency_combine_case({.tokens = {4, 4}, .max_tokens = 4, .hidden = 512});
  run_with_buffers(cluster(2), low_latency_options(2, 4, 512), [&](Rank& rank, Buffer& buffer) {
    LowLatencyDispatchArguments dispatch = upload_arguments(rank, one.before);
    dispatch.combine_weights = rank.upload(std::vector<float>(4), DType::float32, {4, 1});
    require_throws<InvalidArgument>([&] { buffer.low_latency_dispatch(dispatch, rank.call()); },
                                    {"combine_weights", "[4, 4]"}, "weights of another shape");
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one, true);
    LowLatencyCombineArguments combine = with_hook(upload_combine(rank, one, handle));
    combine.overlap = {.num_sms = 1};
    if (handle.has_weights) {
      require_throws<Unsupported>([&] { buffer.low_latency_combine(combine, rank.call()); },
                                  {"overlap", "combine_weights"}, "overlap of sums");
    }
    buffer.check();
  });
}

/// Combine announces its own weights if ranks may be left out.
TEST_P(LowLatencyWeightsTest, AreNotUsedWithMasking) {
  LowLatencyCombineCase one = make_low_latency_combine_case({.tokens = {4, 4}, .max_tokens = 4, .hidden = 512});
  run_with_buffers(cluster(2), low_latency_options(2, 4, 512, patience(), true), [&](Rank& rank, Buffer& buffer) {
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one, true);
    require(!handle.has_weights, "handles of buffers with masking have no weights");
    const auto result = buffer.low_latency_combine(upload_combine(rank, one, handle), rank.call());
    check_low_latency_combine(rank, one, one.expected(), result.combined_x.view());
    buffer.check();
  });
}

}  // namespace
}  // namespace deep_ep::test
