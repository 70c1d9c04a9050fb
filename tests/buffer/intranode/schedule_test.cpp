// The same small round under many schedules of the CPU executor: whatever order fibers, blocks and delayed copies come
// in, the bits are the same. DEEP_EP_TEST_SCHEDULES says how many (20), DEEP_EP_TEST_FIRST_SCHEDULE where to begin (1).
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

/// Everything that has code of its own: scales, top-k, biases, windows smaller than the data, pull and push.
void run_schedule(std::uint64_t seed, const std::vector<Case>& cases) {
  ClusterOptions options{.ranks = 3, .host = {.multiprocessors = 2, .warps_per_block = 2, .seed = seed}};
  run_cluster(options, [&](Rank& rank) {
    // Windows for some tokens' rows per rank, and for fewer than a rank receives in the last case.
    Buffer& buffer =
        rank.buffer({.heap_bytes = std::size_t{1} << 20, .window_bytes = std::size_t{5} << 10, .max_local_experts = 8});
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const bool heap = (static_cast<std::size_t>(rank.rank()) + i) % 2 == 0;
      std::vector<Tensor> hoard;
      if (i == 2) hoard = take_whole_heap(rank, buffer);
      run_round(rank, buffer, cases[i],
                {.num_sms = 0, .num_worst_tokens = i == 1 ? 60 : 0, .returned_in_heap = heap && i != 2});
      rank.release();
    }
    buffer.destroy();
  });
}

const std::vector<Case>& schedule_cases() {
  static const std::vector<Case> cases = {
      make_case({.tokens = {12, 0, 19},
                 .local_experts = 2,
                 .routing = oracle::Routing::some_dropped,
                 .dtype = DType::float8_e4m3,
                 .hidden = 256,
                 .scales = 2,
                 .scale_layout = ScaleLayout::column_major,
                 .combine_hidden = 128,
                 .bias_0 = true,
                 .seed = 5}),
      make_case({.tokens = {9, 14, 6}, .local_experts = 2, .hidden = 64, .combine_hidden = 64, .seed = 6}),
      make_case(
          {.tokens = {11, 8, 17}, .local_experts = 2, .topk = 2, .hidden = 128, .combine_hidden = 128, .seed = 7})};
  return cases;
}

TEST(ScheduleTest, EverySeedGivesTheSame) {
  under_schedules({.usually = 20, .sanitized = 3, .thread_sanitized = 2},
                  [](std::uint64_t seed) { run_schedule(seed, schedule_cases()); });
}

}  // namespace
}  // namespace deep_ep::test
