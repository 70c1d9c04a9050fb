// Low-latency calls that ranks mean in different ways end in RankMismatch on each of them.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/low_latency/params.hpp"
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyDisagreementTest : public ClusterTest {
 protected:
  static constexpr int kRanks = 3;

  /// All tokens go to all ranks.
  static LowLatencyCaseShape shape() {
    return {.tokens = {4, 4, 4}, .max_tokens = 4, .hidden = 512, .local_experts = 2, .topk = 6};
  }

  using Words = std::vector<std::string>;

  /// Each rank calls; rank 1 is the odd one.
  void expect_mismatch(const std::function<void(Rank&, Buffer&, bool odd)>& call, const Words& words) {
    expect_disagreement(cluster_with_absentees(kRanks), low_latency_options(kRanks, 4, 1024, patience()), words, call);
  }
};
DEEP_EP_ON_THREADS(LowLatencyDisagreementTest);

TEST_P(LowLatencyDisagreementTest, OnArgumentsOfDispatch) {
  const LowLatencyCase one = make_low_latency_case(shape());
  for (const bool format : {false, true}) {
    expect_mismatch(
        [&](Rank& rank, Buffer& buffer, bool odd) {
          LowLatencyDispatchArguments arguments = upload_arguments(rank, one);
          if (odd && format) arguments.format = LowLatencyFormat::fp8_ue8m0;
          if (odd && !format) arguments.num_experts = 9;
          buffer.low_latency_dispatch(arguments, rank.call());
        },
        {"low_latency_dispatch", format ? "rows' format is fp8" : "num_experts is", "rank 1"});
  }
}

TEST_P(LowLatencyDisagreementTest, OnWhetherTokensAreTooMany) {
  LowLatencyCaseShape too_many = shape();
  too_many.tokens[1] = 5;
  too_many.max_tokens = 5;
  const LowLatencyCase one = make_low_latency_case(too_many);
  for (const bool hook : {false, true}) {
    expect_mismatch(
        [&](Rank& rank, Buffer& buffer, bool odd) {
          LowLatencyDispatchArguments arguments = upload_arguments(rank, one);
          arguments.max_tokens = 4;
          arguments.return_recv_hook = hook;
          const auto call = [&] { received(buffer.low_latency_dispatch(arguments, rank.call())); };
          if (odd) {
            require_throws<InvalidArgument>(call, {"rows of x", "5"}, "too many tokens");
          } else {
            call();
          }
        },
        {"low_latency_dispatch", "more tokens than max_tokens"});
  }
}

/// A rank combines another dispatch than the others, one that came so many calls later: what ranks tell each other has
/// all of the number.
TEST_P(LowLatencyDisagreementTest, OnADispatchManyCallsLater) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "the test writes into a handle";
  LowLatencyCombineCase one = make_low_latency_combine_case(shape());
  for (const std::int32_t calls : {1 << 16, 1 << 31}) {
    for (const bool hooks : {false, true}) {
      expect_mismatch(
          [&](Rank& rank, Buffer& buffer, bool odd) {
            const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
            const LowLatencyCombineArguments arguments = with_hook(upload_combine(rank, one, handle), hooks);
            rank.executor()->synchronize(rank.stream());
            const TensorView table = handle.row_table.view();
            const LowLatencyRowTable rows{static_cast<std::int32_t*>(table.data), kRanks, 4, 6};
            ASSERT_LT(rows.epoch() - rows.base, table.shape[0] * table.shape[1]);
            if (odd) *rows.epoch() ^= calls;
            received(buffer.low_latency_combine(arguments, rank.call()));
          },
          {"the dispatch that their handles are of"});
    }
  }
}

TEST_P(LowLatencyDisagreementTest, OnHooksOfCombine) {
  const LowLatencyCombineCase one = make_low_latency_combine_case(shape());
  for (const bool hooks : {false, true}) {
    expect_mismatch(
        [&](Rank& rank, Buffer& buffer, bool odd) {
          const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
          received(buffer.low_latency_combine(with_hook(upload_combine(rank, one, handle), hooks != odd), rank.call()));
        },
        {"low_latency_combine", "return_recv_hook"});
  }
}

/// Only expert 0 has rows, which with hooks lie where they would without. Who calls without gets none, rather than
/// rows that nobody has multiplied by their weights.
TEST_P(LowLatencyDisagreementTest, OnHooksOfCombineWhereRowsLieAtTheSamePlaces) {
  const LowLatencyCase one =
      make_low_latency_case({.tokens = {4, 4}, .max_tokens = 4, .hidden = 512, .local_experts = 1, .topk = 1});
  expect_disagreement(cluster_with_absentees(2), low_latency_options(2, 4, 512, patience()),
                      {"low_latency_combine", "return_recv_hook"}, [&](Rank& rank, Buffer& buffer, bool odd) {
                        LowLatencyDispatchArguments dispatch = upload_arguments(rank, one);
                        dispatch.topk_idx = rank.upload(std::vector<std::int64_t>(4, 0), DType::int64, {4, 1});
                        const LowLatencyDispatchResult dispatched = buffer.low_latency_dispatch(dispatch, rank.call());
                        const auto combine = combine_anything(rank, dispatched.handle, dispatch.topk_idx, 2);
                        received(buffer.low_latency_combine(with_hook(combine, !odd), rank.call()));
                      });
}

/// With hooks, rows of all ranks lie together, so rows of another size lie where those of others should. Nobody is told
/// that a rank which means the same lacks a row.
TEST_P(LowLatencyDisagreementTest, OnTheSizeOfRowsOfCombine) {
  for (const std::int64_t hidden : {256, 1024}) {
    LowLatencyCaseShape dispatched = shape();
    const LowLatencyCombineCase one = make_low_latency_combine_case(dispatched);
    const LowLatencyCombineCase other = make_low_latency_combine_case(dispatched, hidden);
    expect_mismatch(
        [&](Rank& rank, Buffer& buffer, bool odd) {
          const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
          const LowLatencyCombineArguments arguments = with_hook(upload_combine(rank, odd ? other : one, handle));
          buffer.low_latency_combine(arguments, rank.call()).hook();
        },
        {"low_latency_combine: ranks", "1", "differ in", "hidden"});
  }
}

/// Combines what experts 0, 3 and 6 made of four tokens, one expert of each rank; what selections it asks for, `change`
/// says.
void combine_own_choice(Rank& rank, Buffer& buffer, const std::function<void(std::vector<std::int64_t>&)>& change,
                        bool hooks = false, int times = 1) {
  const LowLatencyCase one = make_low_latency_case({.tokens = {4, 4, 4}, .max_tokens = 4, .hidden = 512, .topk = 3});
  LowLatencyDispatchArguments dispatch = upload_arguments(rank, one);
  std::vector<std::int64_t> experts = {0, 3, 6, 0, 3, 6, 0, 3, 6, 0, 3, 6};
  dispatch.topk_idx = rank.upload(experts, DType::int64, {4, 3});
  const LowLatencyDispatchResult dispatched = buffer.low_latency_dispatch(dispatch, rank.call());
  change(experts);
  const TensorView selected = rank.upload(experts, DType::int64, {4, 3});
  const auto combine = with_hook(combine_anything(rank, dispatched.handle, selected, 1), hooks);
  for (int i = 0; i < times; ++i) {
    received(buffer.low_latency_combine(combine, rank.call()));
    buffer.check();
  }
}

/// An expert's rank finds out that a token selects what was not dispatched there; with hooks the rank that selects it.
/// The others may finish the call; in the next one they hear of it.
TEST_P(LowLatencyDisagreementTest, OnWhatATokenSelected) {
  for (const bool hooks : {false, true}) {
    for (const bool moves : {false, true}) {  // to the place of another one, or another expert of the same rank
      const std::string expert = moves ? "" : "1 (rank 0) for token 2";
      run_cluster(cluster_with_absentees(kRanks), [&](Rank& rank) {
        Buffer& buffer = rank.buffer(low_latency_options(kRanks, 4, 512, patience()));
        const auto change = [&](std::vector<std::int64_t>& experts) {
          if (rank.rank() == 1 && moves) std::swap(experts[6], experts[7]);
          if (rank.rank() == 1 && !moves) experts[6] = 1;
        };
        const auto call = [&] { combine_own_choice(rank, buffer, change, hooks, 2); };
        if (rank.rank() == (hooks ? 1 : 0) && (hooks || !moves)) {  // without, ranks 0 and 1 find out a move
          require_throws<RankMismatch>(call, {"topk_idx of rank 1 selects expert " + expert}, "the cause");
        } else if (rank.rank() == 2) {
          require_throws<RankMismatch>(call, {"has ended the call, and its own error says why"}, "another rank");
        } else {
          require_throws<RankMismatch>(call, {"The ranks no longer agree"}, "another rank, which may find out itself");
        }
        rank.bootstrap()->barrier();
      });
    }
  }
}

/// Rank 2 does not combine. Its rows may be of another size, and lie over the one that rank 1 misses: nobody says that
/// ranks 0 and 1 disagree.
TEST_P(LowLatencyDisagreementTest, OnWhatATokenSelectedBesideARankThatIsLate) {
  run_cluster(cluster_with_absentees(kRanks), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(kRanks, 4, 512, short_deadline()));
    const auto change = [&](std::vector<std::int64_t>& experts) {
      if (rank.rank() == 1) experts[6] = 1;
    };
    const auto call = [&] { combine_own_choice(rank, buffer, change, true, rank.rank() == 2 ? 0 : 1); };
    if (rank.rank() == 2) {
      call();
    } else {
      require_throws<TimeoutError>(call, {"for rank 2"}, "who waits");
    }
    rank.bootstrap()->barrier();
  });
}

/// Tokens name an expert more than once, and its rank gets more rows than fit: its calls end, and so do those of the
/// others, which learn why.
TEST_P(LowLatencyDisagreementTest, OnRoomForRowsOfAnExpert) {
  const LowLatencyCase one =
      make_low_latency_case({.tokens = {2, 2}, .max_tokens = 2, .hidden = 512, .local_experts = 1, .topk = 2});
  for (const bool hooks : {false, true}) {
    run_cluster(cluster_with_absentees(2), [&](Rank& rank) {
      Buffer& buffer = rank.buffer(low_latency_options(2, 2, 512, patience()));
      LowLatencyDispatchArguments dispatch = upload_arguments(rank, one);
      dispatch.topk_idx = rank.upload(std::vector<std::int64_t>(4, 0), DType::int64, {2, 2});  // eight for four places
      const LowLatencyDispatchResult dispatched = buffer.low_latency_dispatch(dispatch, rank.call());
      if (rank.rank() == 0) {
        require_throws<OutOfMemory>([&] { buffer.check(); }, {"expert 0", "rank 0", "the 4 rows", "destroy"}, "rows");
        require_throws<OutOfMemory>([&] { buffer.check(); }, {"expert 0"}, "the buffer is broken");
      } else {
        const auto combine = combine_anything(rank, dispatched.handle, dispatch.topk_idx, 1);
        const auto call = [&] {
          received(buffer.low_latency_combine(with_hook(combine, hooks), rank.call()));
          buffer.check();
        };
        require_throws<RankMismatch>(call, {"rank 0 has ended the call, and its own error says why"}, "the other");
      }
      rank.bootstrap()->barrier();
    });
  }
}

}  // namespace
}  // namespace deep_ep::test
