// Ranks that do not agree.
#include <array>
#include <functional>
#include <string>

#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class DisagreementTest : public ClusterTest {
 protected:
  /// Rank 1 calls with `odd`, the others with `common`, with a host wait and without: all must learn of it, and the
  /// next round must work.
  void expect_mismatch(const Shape& common, const Shape& odd) {
    const Case good = make_case(common);
    const Case strange = make_case(odd);
    run_with_buffers(cluster(common.ranks()), [&](Rank& rank, Buffer& buffer) {
      for (const std::int64_t worst : {0, 32}) {
        if (worst != 0 && !odd.with_topk) continue;
        Inputs inputs = upload_inputs(rank, rank.rank() == 1 ? strange : good);
        inputs.dispatch.num_worst_tokens = worst;
        require_mismatch(buffer, {"rank 1"}, [&] { buffer.dispatch(inputs.dispatch, rank.call()); });
        run_round(rank, buffer, good);
      }
    });
  }

  /// Both ranks dispatch `good`. Then comes `call`, in which `what` has these values on them.
  void expect_late_mismatch(const Case& good, const std::string& what, const std::array<int, 2>& values,
                            const std::function<void(Rank&, Buffer&, const DispatchResult&)>& call) {
    run_cluster(cluster_with_absentees(2), [&](Rank& rank) {
      Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{16} << 20, .timeout_s = short_deadline()});
      const DispatchResult result = buffer.dispatch(upload_inputs(rank, good).dispatch, rank.call());
      const auto mine = static_cast<std::size_t>(rank.rank());
      const std::string words = what + " is " + std::to_string(values[mine]) + " on rank " + std::to_string(mine) +
                                " but " + std::to_string(values[1 - mine]) + " on rank " + std::to_string(1 - mine);
      require_end(buffer, words, [&] { call(rank, buffer, result); });
      rank.bootstrap()->barrier();
    });
  }
  /// The same in a cached dispatch, for which rank 1 has rows as in `odd`.
  void expect_cached_mismatch(const Shape& good, const Shape& odd, const std::string& what,
                              const std::array<int, 2>& values) {
    const Case cases[] = {make_case(good), make_case(odd)};
    expect_late_mismatch(cases[0], what, values, [&](Rank& rank, Buffer& buffer, const DispatchResult& result) {
      const Inputs again = upload_inputs(rank, cases[rank.rank()]);
      buffer.dispatch(cached_dispatch(again, result.handle), rank.call());
    });
  }

  /// `call` fails on every rank, with what this one is to say.
  static void require_end(Buffer& buffer, const std::string& words, const std::function<void()>& call) {
    require_mismatch(buffer, {words}, call);
    require_throws<RankMismatch>([&] { buffer.check(); }, {words}, "every later call");
  }
};
DEEP_EP_ON_THREADS(DisagreementTest);

TEST_P(DisagreementTest, OnWhatIsSent) {
  const Shape common{.tokens = {5, 6}, .local_experts = 4, .topk = 4, .hidden = 64, .scales = 2};
  std::vector<Shape> odd(7, common);
  odd[0].dtype = DType::float16;
  odd[1].topk = 3;
  odd[2].with_topk = false;
  odd[3].local_experts = 5;
  odd[4].scales = 0;
  odd[5].scales = 3;
  odd[6].hidden = 72;
  for (const Shape& one : odd) expect_mismatch(common, one);
}

TEST_P(DisagreementTest, OnHavingWeights) {
  const Case one = make_case({.tokens = {5, 6}});
  run_with_buffers(cluster(2), [&](Rank& rank, Buffer& buffer) {
    for (const std::int64_t worst : {0, 32}) {
      Inputs inputs = upload_inputs(rank, one);
      inputs.dispatch.num_worst_tokens = worst;
      if (rank.rank() == 1) inputs.dispatch.topk_weights.reset();
      require_mismatch(buffer, {"topk_weights is ", "not given", "rank 1"},
                       [&] { buffer.dispatch(inputs.dispatch, rank.call()); });
      run_round(rank, buffer, one);
    }
  });
}

// Where no counts are exchanged, ranks see it when they learn where the others want their rows, or have them.

TEST_P(DisagreementTest, OnScalesOfACachedDispatch) {
  expect_cached_mismatch({.tokens = {5, 6}, .scales = 2}, {.tokens = {5, 6}, .scales = 3},
                         "dispatch: number of scales of a row", {2, 3});
}

TEST_P(DisagreementTest, OnHiddenOfACachedDispatch) {
  expect_cached_mismatch({.tokens = {5, 6}, .hidden = 64}, {.tokens = {5, 6}, .hidden = 72},
                         "dispatch: bytes of a row of x", {128, 144});
}

TEST_P(DisagreementTest, OnTopkOfCombine) {
  const Case one = make_case({.tokens = {5, 6}, .topk = 4});
  expect_late_mismatch(one, "combine: top-k", {4, 0}, [&](Rank& rank, Buffer& buffer, const DispatchResult& result) {
    Returned returned = upload_returned(rank, buffer, one, result.handle, true);
    if (rank.rank() == 1) returned.combine.topk_weights.reset();
    buffer.combine(returned.combine, rank.call());
  });
}

TEST_P(DisagreementTest, OnHiddenOfCombine) {
  const Case good = make_case({.tokens = {5, 6}, .combine_hidden = 64});
  const Case odd = make_case({.tokens = {5, 6}, .combine_hidden = 72});
  expect_late_mismatch(good, "combine: bytes of a row of x", {128, 144},
                       [&](Rank& rank, Buffer& buffer, const DispatchResult& result) {
                         const Case& one = rank.rank() == 1 ? odd : good;
                         const Returned returned = upload_returned(rank, buffer, one, result.handle, true);
                         buffer.combine(returned.combine, rank.call());
                       });
}

// The ranks' rows belong to different calls: nobody may read those of another.
TEST_P(DisagreementTest, OnTheDispatchThatIsCombined) {
  const Case one = make_case({.tokens = {5, 6}});
  const Case other = make_case({.tokens = {9, 12}});
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{16} << 20, .timeout_s = short_deadline()});
    const DispatchResult first = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
    const DispatchResult second = buffer.dispatch(upload_inputs(rank, other).dispatch, rank.call());
    const bool is_odd = rank.rank() == 1;
    const Returned returned =
        upload_returned(rank, buffer, is_odd ? other : one, (is_odd ? second : first).handle, true);
    require_end(buffer, "the handles are of different dispatches",
                [&] { buffer.combine(returned.combine, rank.call()); });
    rank.bootstrap()->barrier();
  });
}

/// What is enqueued behind a fault that its host has not seen does nothing, and does not count: only rank 0 does it.
TEST_P(DisagreementTest, CallsBehindAFaultDoNotCount) {
  const Case good = make_case({.tokens = {5, 6}, .hidden = 64});
  const Case odd = make_case({.tokens = {5, 6}, .hidden = 72});
  run_with_buffers(cluster(2), [&](Rank& rank, Buffer& buffer) {
    const DispatchResult earlier = buffer.dispatch(upload_inputs(rank, good).dispatch, rank.call());
    const Returned returned = upload_returned(rank, buffer, good, earlier.handle, true);
    Inputs inputs = upload_inputs(rank, rank.rank() == 0 ? good : odd);
    inputs.dispatch.num_worst_tokens = 32;
    if (rank.rank() == 1) rank.bootstrap()->barrier();  // rank 0 has enqueued all that follows
    buffer.dispatch(inputs.dispatch, rank.call());
    if (rank.rank() == 0) {
      buffer.dispatch(inputs.dispatch, rank.call());
      buffer.combine(returned.combine, rank.call());
      rank.bootstrap()->barrier();
    }
    require_throws<RankMismatch>([&] { buffer.check(); }, {"rank 1"}, "check");
    for (int i = 0; i < 2; ++i) run_round(rank, buffer, good);
  });
}

}  // namespace
}  // namespace deep_ep::test
