// Calls of normal mode between nodes that are not a plain round: cached ones, many on their way, under many schedules;
// ranks that do not agree; too little memory.
#include "tests/cluster/disagreement.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/marking_executor.hpp"

namespace deep_ep::test {
namespace {

constexpr std::size_t kCallsHeap = std::size_t{8} << 20;
constexpr std::size_t kCallsWindow = std::size_t{24} << 10;

/// Four ranks on two nodes.
Shape four_ranks_of_two_nodes(std::uint64_t seed) {
  return {.tokens = {13, 0, 30, 9}, .local_experts = 2, .ranks_per_node = 2, .seed = seed};
}

class InternodeCallsTest : public ClusterTest {
 protected:
  static BufferOptions options(std::size_t window_bytes = 0) {
    return {.heap_bytes = kCallsHeap, .window_bytes = window_bytes, .ranks_per_node = 2};
  }
};
DEEP_EP_ON_THREADS(InternodeCallsTest);

/// Where no counts are exchanged, rails tell each other of what shape their rows are.
TEST_P(InternodeCallsTest, CachedCallsMustAgreeBetweenNodes) {
  const Case one = make_case(four_ranks_of_two_nodes(5));
  Shape wide = four_ranks_of_two_nodes(5);
  wide.hidden = 128;
  const Case other = make_case(wide);
  run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
    BufferOptions short_wait = options();
    short_wait.timeout_s = short_deadline();
    Buffer& buffer = rank.buffer(short_wait);
    const DispatchResult first = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
    const Inputs inputs = upload_inputs(rank, rank.rank() < 2 ? one : other);
    require_mismatch(buffer, {"rank", "bytes of a row of x"},
                     [&] { buffer.dispatch(cached_dispatch(inputs, first.handle), rank.call()); });
    rank.bootstrap()->barrier();
  });
}

/// Rows beyond num_worst_tokens are lost; nobody waits for them, in combine either.
TEST_P(InternodeCallsTest, TooSmallAWorstCaseIsRaised) {
  constexpr std::int64_t kRoom = 5;
  const Case one = make_case(four_ranks_of_two_nodes(10));
  for (const bool rows_fit_the_heap : {true, false}) {
    run_with_buffers(cluster(4), options(kCallsWindow), [&](Rank& rank, Buffer& buffer) {
      std::vector<Tensor> hoard;
      if (!rows_fit_the_heap && rank.rank() != 2) hoard = take_whole_heap(rank, buffer);
      Inputs inputs = upload_inputs(rank, one);
      inputs.dispatch.num_worst_tokens = kRoom;
      const DispatchResult result = buffer.dispatch(inputs.dispatch, rank.call());
      const CombineArguments back{.x = result.recv_x.view(), .handle = &result.handle};
      require(one.rows(rank.rank()) > kRoom, "the case is too small");
      require_throws<OutOfMemory>([&] { buffer.check(); }, {"num_worst_tokens leaves room for 5"}, "the next call");
      buffer.combine(back, rank.call());
      buffer.check();
      hoard.clear();
      run_round(rank, buffer, one);
    });
  }
}

/// Rank 3 gets no row, but hands on those that rank 1 sends to rank 2: combine needs to know where they are.
TEST_P(InternodeCallsTest, TooSmallAWorstCaseOfARelayIsRaised) {
  constexpr std::int64_t kTokens = 74;  // a table of 72 rows is larger than the pool's smallest blocks of 512 bytes
  const Shape shape{.tokens = {0, kTokens, 0, 0}, .routing = oracle::Routing::one_hot_expert, .ranks_per_node = 2};
  const Case one = make_case(shape);
  ASSERT_EQ(one.rows(2), kTokens);
  for (const std::int64_t room : {kTokens / 2 - 1, kTokens / 2}) {
    run_cluster(cluster(4), [&](Rank& rank) {
      Buffer buffer(rank.bootstrap(), std::make_shared<MarkingExecutor>(rank.executor()), options(kCallsWindow));
      Inputs inputs = upload_inputs(rank, one);
      inputs.dispatch.num_worst_tokens = rank.rank() == 3 ? room : 128;
      const DispatchResult result = buffer.dispatch(inputs.dispatch, rank.call());
      if (rank.rank() == 3 && 2 * room < kTokens) {
        require_throws<OutOfMemory>([&] { buffer.check(); }, {"rank 3", "74 tokens", "num_worst_tokens", "room for 72"},
                                    "the next call");
        // Two ranks' places of the two tokens too many would lie behind the table.
        TensorView behind = result.handle.relay_rows.view();
        require(behind.bytes() == 576, "the table has another size than this test means");
        behind = TensorView::contiguous(behind.as<std::byte>() + behind.bytes(), DType::int32, {4}, behind.device);
        require_same(std::vector<std::uint32_t>(4, MarkingExecutor::kMark), rank.download<std::uint32_t>(behind),
                     "behind the table");
      } else {
        buffer.check();
      }
      rank.bootstrap()->barrier();
      run_round(rank, buffer, one);
      buffer.destroy();
    });
  }
}

TEST_P(InternodeCallsTest, AWindowMustHoldTwoRows) {
  const Case one = make_case({.tokens = {3, 4}, .hidden = 2048, .ranks_per_node = 1});
  run_with_buffers(cluster(2), {.heap_bytes = kCallsHeap, .window_bytes = std::size_t{8} << 10, .ranks_per_node = 1},
                   [&](Rank& rank, Buffer& buffer) {
                     const Inputs inputs = upload_inputs(rank, one);
                     require_throws<OutOfMemory>([&] { buffer.dispatch(inputs.dispatch, rank.call()); },
                                                 {"does not hold two rows", "internode.heap_bytes"}, "dispatch");
                   });
}

TEST(InternodeScheduleTest, EverySeedGivesTheSame) {
  Shape eight_bits = four_ranks_of_two_nodes(8);
  eight_bits.dtype = DType::float8_e4m3;
  eight_bits.scales = 2;
  const Case cases[] = {make_case(four_ranks_of_two_nodes(9)), make_case(eight_bits)};
  under_schedules({.usually = 20, .sanitized = 3, .thread_sanitized = 2}, [&](std::uint64_t seed) {
    ClusterOptions options{.ranks = 4, .host = {.multiprocessors = 2, .warps_per_block = 3, .seed = seed}};
    // Mostly one that holds a few rows: rings wrap many times, and everybody waits for room.
    const std::size_t window_bytes = seed % 4 == 0 ? kCallsWindow : std::size_t{seed % 4 == 3 ? 12u : 8u} << 10;
    run_with_buffers(
        options, {.heap_bytes = kCallsHeap, .window_bytes = window_bytes, .max_local_experts = 8, .ranks_per_node = 2},
        [&](Rank& rank, Buffer& buffer) {
          for (const Case& one : cases) {
            run_round(rank, buffer, one,
                      {.num_worst_tokens = &one == cases ? 0 : 128, .returned_in_heap = seed % 2 == 0});
            rank.release();
          }
        });
  });
}

}  // namespace
}  // namespace deep_ep::test
