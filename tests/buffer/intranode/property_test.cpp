// Random rounds over everything that may vary. A failure prints the seed: set DEEP_EP_TEST_SEED to repeat it.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class PropertyTest : public ClusterTest {
 protected:
  std::uint64_t seed_ = test_seed();
};
DEEP_EP_ON_THREADS(PropertyTest);

RoundOptions random_round(oracle::Random& random, const Shape& shape) {
  RoundOptions round;
  round.config = {.num_sms = static_cast<int>(random.below(5)), .warps_per_block = static_cast<int>(random.below(4))};
  if (shape.with_topk && random.chance(0.3)) {
    round.num_worst_tokens = shape.max_tokens() * shape.ranks() + 1 + random.below(20);
  }
  round.use_layout_call = random.chance(0.5);
  return round;
}

TEST_P(PropertyTest, RandomRoundsMatchTheOracle) {
  oracle::Random random(seed_);
  const auto buffers = environment_number("DEEP_EP_TEST_ROUNDS", under_thread_sanitizer() ? 2 : 16);
  for (std::int64_t i = 0; i < buffers; ++i) {
    const int choices[] = {1, 2, 2, 3, 4, 5, 8};
    const int ranks = random.pick(choices);
    DEEP_EP_NEEDS_RANKS(ranks);
    ClusterOptions options = cluster(ranks);
    options.host = {.multiprocessors = static_cast<int>(1 + random.below(3)),
                    .warps_per_block = static_cast<int>(1 + random.below(3)),
                    .seed = random.chance(0.3) ? 0 : random.next()};
    BufferOptions buffer_options{.heap_bytes = std::size_t{32} << 20};
    // Small enough for several rounds, large enough for two of the longest rows from each of eight ranks.
    if (random.chance(0.5)) buffer_options.window_bytes = std::size_t{80} << 10;
    std::vector<bool> short_of_memory;
    for (int r = 0; r < ranks; ++r) short_of_memory.push_back(random.chance(0.3));
    std::vector<Case> cases;
    std::vector<std::vector<RoundOptions>> rounds;
    for (int c = 0; c < 4; ++c) {
      cases.push_back(make_case(random_shape(random, ranks)));
      rounds.emplace_back();
      // What every rank must choose alike is drawn once; where the rows lie, once per rank.
      const RoundOptions common = random_round(random, cases.back().shape);
      for (int r = 0; r < ranks; ++r) {
        rounds.back().push_back(common);
        rounds.back().back().returned_in_heap = !short_of_memory[static_cast<std::size_t>(r)] && random.chance(0.5);
      }
    }
    SCOPED_TRACE("DEEP_EP_TEST_SEED=" + std::to_string(seed_) + ", buffer " + std::to_string(i));
    run_cluster(options, [&](Rank& rank) {
      Buffer& buffer = rank.buffer(buffer_options);
      std::vector<Tensor> hoard;
      if (short_of_memory[static_cast<std::size_t>(rank.rank())]) hoard = take_whole_heap(rank, buffer);
      for (std::size_t c = 0; c < cases.size(); ++c) {
        run_round(rank, buffer, cases[c], rounds[c][static_cast<std::size_t>(rank.rank())]);
        rank.release();
      }
      buffer.destroy();
    });
  }
}

}  // namespace
}  // namespace deep_ep::test
