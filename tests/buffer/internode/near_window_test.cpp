// Rows between nodes for which the heap has no room: they come, and go back, through the near window.
#include <utility>

#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

constexpr std::size_t kNearHeap = std::size_t{8} << 20;

/// Whose heap is taken before any call.
using Hoarders = std::vector<bool>;

class InternodeNearWindowTest : public ClusterTest {};
DEEP_EP_ON_THREADS(InternodeNearWindowTest);

/// One round after the other, with room for no row in the heaps of some ranks.
void run_without_room(const ClusterOptions& cluster, const BufferOptions& options, const Hoarders& hoarders,
                      const std::vector<std::pair<Case, RoundOptions>>& rounds) {
  run_with_buffers(cluster, options, [&](Rank& rank, Buffer& buffer) {
    std::vector<Tensor> hoard;
    if (hoarders[static_cast<std::size_t>(rank.rank())]) hoard = take_whole_heap(rank, buffer);
    for (const auto& [one, round] : rounds) {
      run_round(rank, buffer, one, round);
      rank.release();
    }
    hoard.clear();
    run_round(rank, buffer, rounds.front().first, rounds.front().second);
  });
}

std::pair<Case, RoundOptions> round_of(const Shape& shape, std::int64_t worst = 0) {
  RoundOptions round;
  round.num_worst_tokens = worst;
  round.returned_in_heap = false;
  return {make_case(shape), round};
}

Shape two_by_two(std::uint64_t seed) {
  return {.tokens = {33, 0, 90, 17}, .local_experts = 2, .ranks_per_node = 2, .seed = seed};
}

TEST_P(InternodeNearWindowTest, OneRankOrAllOfThem) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "the random rounds have smaller rows";
  Shape bytes = two_by_two(2);
  bytes.dtype = DType::float8_e4m3;
  bytes.hidden = 4096;  // several pieces of a row
  bytes.scales = 150;   // more than a warp's lanes hold
  ClusterOptions options = cluster(4);
  options.host = {.multiprocessors = 2, .warps_per_block = 4};
  for (const Hoarders& hoarders : {Hoarders{false, true, false, false}, Hoarders{true, true, true, true}}) {
    run_without_room(options, {.heap_bytes = kNearHeap, .ranks_per_node = 2}, hoarders,
                     {round_of(two_by_two(1)), round_of(bytes), round_of(two_by_two(3), 500)});
  }
}

/// Under many schedules, with a slot or two of each queue.
TEST(InternodeNearWindowScheduleTest, EverySeedGivesTheSame) {
  Shape eight_bits = two_by_two(8);
  eight_bits.dtype = DType::float8_e4m3;
  eight_bits.scales = 2;
  const std::vector rounds = {round_of(two_by_two(9)), round_of(eight_bits, 200)};
  const BufferOptions small_buffer{.heap_bytes = std::size_t{2} << 20,
                                   .window_bytes = std::size_t{8} << 10,
                                   .max_local_experts = 8,
                                   .ranks_per_node = 2};
  under_schedules({.usually = 16}, [&](std::uint64_t seed) {
    ClusterOptions options{.ranks = 4, .host = {.multiprocessors = 2, .warps_per_block = 4, .seed = seed}};
    run_without_room(options, small_buffer, {true, seed % 2 == 0, seed % 3 != 0, true}, rounds);
  });
}

/// The near window must hold a row of every rank in dispatch, and in combine where rows are pushed.
TEST_P(InternodeNearWindowTest, SmallWindowsAreNamed) {
  Shape wide = two_by_two(5);
  wide.combine_hidden = 640;
  const Case one = make_case(wide);
  Shape wider = two_by_two(5);
  wider.hidden = 1024;
  const Case large = make_case(wider);
  run_with_buffers(cluster(4), {.heap_bytes = kNearHeap, .window_bytes = std::size_t{14} << 10, .ranks_per_node = 2},
                   [&](Rank& rank, Buffer& buffer) {
                     const std::vector<Tensor> hoard = take_whole_heap(rank, buffer);
                     require_throws<OutOfMemory>(
                         [&] { buffer.dispatch(upload_inputs(rank, large).dispatch, rank.call()); },
                         {"a quarter of its window", "a row of 2.12 KiB from each of 4 ranks", "internode.heap_bytes"},
                         "dispatch");
                     const DispatchResult first = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
                     check_dispatch(rank, one, first);
                     const Returned returned = upload_returned(rank, buffer, one, first.handle, false);
                     if (first.handle.num_recv_rows > 0) {
                       require_throws<OutOfMemory>(
                           [&] { buffer.combine(returned.combine, rank.call()); },
                           {"rows outside the heap", "from each of 4 ranks", "internode.heap_bytes"}, "combine");
                     }
                   });
}

}  // namespace
}  // namespace deep_ep::test
