// Dispatch without a host wait: worst-case sizes, and cached layouts.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class DispatchModesTest : public ClusterTest {};
DEEP_EP_ON_THREADS(DispatchModesTest);

TEST_P(DispatchModesTest, WorstCaseHasTheExactPrefixAndNoTail) {
  std::vector<Shape> shapes;
  for (const auto routing : oracle::kRoutings) {
    shapes.push_back({.tokens = {16, 9, 0},
                      .routing = routing,
                      .dtype = DType::uint8,
                      .hidden = 48,
                      .scales = 3,
                      .seed = shapes.size() + 1});
  }
  for (const bool heap : {true, false}) {
    run_rounds(cluster(3), shapes, {.num_sms = 0, .num_worst_tokens = 48, .returned_in_heap = heap});
  }
}

// Both ranks send all their tokens to both, 25 rows in all; there is room for 24. What lies behind the room of one
// output is the next one, whose rows may be stored before or after. Behind the room of the last one, the source's
// tokens, the heap has memory that no row uses.
TEST_P(DispatchModesTest, TheFirstRowThatDoesNotFitIsWrittenNowhere) {
  const Case one = make_case({.tokens = {12, 13}, .local_experts = 2, .topk = 4});
  run_cluster(cluster(2), [&](Rank& rank) {
    constexpr std::int64_t kRows = 24;
    // In the heap; from a window that holds all rows; through one that does not, in rounds.
    for (const auto& [full, window_bytes] :
         {std::pair{false, std::size_t{0}}, {true, std::size_t{256} << 10}, {true, std::size_t{3} << 10}}) {
      Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{2} << 20, .window_bytes = window_bytes});
      const std::vector<Tensor> hoard = full ? take_whole_heap(rank, buffer) : std::vector<Tensor>{};
      Inputs inputs = upload_inputs(rank, one);
      inputs.dispatch.num_worst_tokens = kRows;
      const DispatchResult result = buffer.dispatch(inputs.dispatch, rank.call());
      require_throws<OutOfMemory>([&] { buffer.check(); }, {"num_worst_tokens", "24", "25"}, "check");
      const auto fits = [](auto all, std::size_t width) {
        all.resize(kRows * width);
        return all;
      };
      const oracle::Received& wanted = one.dispatched.received[static_cast<std::size_t>(rank.rank())];
      const std::size_t bytes = one.shape.row_bytes();
      require_same(fits(wanted.x, bytes), rank.download<std::byte>(result.recv_x.view()), "recv_x");
      require_same(fits(wanted.topk_idx, 4), rank.download<std::int64_t>(result.recv_topk_idx->view()),
                   "recv_topk_idx");
      require_same(fits(wanted.topk_weights, 4), rank.download<float>(result.recv_topk_weights->view()), "weights");
      TensorView src_idx = result.handle.recv_src_idx.view();
      require_same(fits(wanted.src_idx, 1), rank.download<std::int32_t>(src_idx), "src_idx");
      if (full) continue;
      ++src_idx.shape[0];
      require(rank.download<std::int32_t>(src_idx)[kRows] != wanted.src_idx[kRows], "the row behind the room is there");
    }
  });
}

/// Each of two ranks sends all its 12 tokens to both; each has room for 14 rows, so 10 tokens of rank 1 are lost. A
/// ring holds many rows, or 8: a row behind lost ones, of which nobody says that they were read, would wait for ever.
TEST_P(DispatchModesTest, CombineAfterAnOverflowLeavesLostRowsOut) {
  const Case one = make_case({.tokens = {12, 12}, .local_experts = 1, .topk = 2});
  constexpr std::int64_t kRows = 14, kHidden = 64;
  constexpr std::uint16_t kOne = 0x3f80, kTwo = 0x4000;  // bfloat16
  run_cluster(cluster(2), [&](Rank& rank) {
    for (const std::size_t window_bytes : {std::size_t{0}, std::size_t{2} << 10}) {
      Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{4} << 20, .window_bytes = window_bytes});
      Inputs inputs = upload_inputs(rank, one);
      inputs.dispatch.num_worst_tokens = kRows;
      const DispatchResult result = buffer.dispatch(inputs.dispatch, rank.call());
      require_throws<OutOfMemory>([&] { buffer.check(); }, {"num_worst_tokens"}, "check after the overflow");

      const std::vector<std::uint16_t> ones(kRows * kHidden, kOne);
      const TensorView copied = rank.upload(ones, DType::bfloat16, {kRows, kHidden});
      const Tensor pulled = buffer.allocate_tensor(DType::bfloat16, {kRows, kHidden}, rank.call().stream);
      rank.executor()->copy(pulled.data(), copied.data, copied.bytes(), rank.call().stream);
      std::vector<Tensor> hoard;
      for (int way = 0; way < 3; ++way) {
        if (way == 2) hoard = take_whole_heap(rank, buffer);  // rows are pushed
        const TensorView& x = way == 0 ? pulled.view() : copied;
        const CombineResult combined = buffer.combine({.x = x, .handle = &result.handle}, rank.call());
        const auto sums = rank.download<std::uint16_t>(combined.combined_x.view());
        for (std::size_t token = 0; token < 12; ++token) {
          const std::uint16_t expected = rank.rank() == 1 && token >= 2 ? 0 : kTwo;
          require(sums[token * kHidden] == expected, "token " + std::to_string(token) + " has the wrong sum");
        }
      }
    }
  });
}

TEST_P(DispatchModesTest, CachedCallsMayChangeTypeAndWidth) {
  const Shape first{.tokens = {14, 0, 20}};
  std::vector<Shape> later(4, first);
  later[0].hidden = 512;
  later[1].dtype = DType::float8_e4m3, later[1].hidden = 256, later[1].scales = 2;
  later[1].scale_layout = ScaleLayout::column_major;
  later[2].dtype = DType::uint8, later[2].hidden = 16, later[2].scales = 33, later[2].scale_dtype = DType::int32;
  std::vector<Case> cases = {make_case(first)};
  for (const Shape& shape : later) cases.push_back(make_case(shape));
  run_with_buffers(cluster(3), [&](Rank& rank, Buffer& buffer) {
    for (const std::int64_t worst : {0, 64}) {
      Inputs inputs = upload_inputs(rank, cases[0]);
      inputs.dispatch.num_worst_tokens = worst;
      const DispatchResult original = buffer.dispatch(inputs.dispatch, rank.call());
      for (const Case& one : cases) {
        const Inputs again = upload_inputs(rank, one);
        const DispatchResult result = buffer.dispatch(cached_dispatch(again, original.handle), rank.call());
        check_dispatch(rank, one, result, {.cached = true, .num_worst_tokens = worst});
        Returned returned = upload_returned(rank, buffer, one, result.handle, true);
        check_combine(rank, one, buffer.combine(returned.combine, rank.call()));
      }
      check_dispatch(rank, cases[0], original, {.cached = false, .num_worst_tokens = worst});
    }
  });
}

TEST_P(DispatchModesTest, AnOldHandleSurvivesLaterCalls) {
  const Case old = make_case({.tokens = {14, 20}, .seed = 3});
  const Case other = make_case({.tokens = {31, 2}, .topk = 2, .seed = 4});
  run_with_buffers(cluster(2), [&](Rank& rank, Buffer& buffer) {
    const DispatchResult kept = buffer.dispatch(upload_inputs(rank, old).dispatch, rank.call());
    for (int i = 0; i < 5; ++i) run_round(rank, buffer, other, {.num_sms = 0, .num_worst_tokens = i % 2 == 0 ? 0 : 80});
    check_dispatch(rank, old, kept);
    for (const bool heap : {true, false}) {
      Returned returned = upload_returned(rank, buffer, old, kept.handle, heap);
      check_combine(rank, old, buffer.combine(returned.combine, rank.call()));
    }
  });
}

}  // namespace
}  // namespace deep_ep::test
