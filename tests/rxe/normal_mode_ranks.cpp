#include "tests/rxe/normal_mode_ranks.hpp"

#include <vector>

#include "tests/cluster/cluster.hpp"
#include "tests/cluster/exchange.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {

void run_normal_mode(const std::shared_ptr<Bootstrap>& bootstrap, int ranks_per_node) {
  const ClusterOptions options{
      .ranks = bootstrap->size(), .where = {}, .host = {.multiprocessors = 2}, .timeout_s = long_patience()};
  Rank rank(bootstrap->rank(), options, bootstrap, make_host_executor(options.host));
  Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{16} << 20, .window_bytes = std::size_t{96} << 10});
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    std::vector<std::int64_t> tokens;
    for (int other = 0; other < rank.size(); ++other) tokens.push_back(other == 1 ? 0 : 40 + other);
    const Case one = make_case({.tokens = tokens,
                                .routing = oracle::Routing::some_dropped,
                                .hidden = 256,
                                .combine_hidden = 256,
                                .bias_0 = true,
                                .ranks_per_node = ranks_per_node,
                                .seed = seed});
    run_round(rank, buffer, one, {.returned_in_heap = seed != 2});
    rank.release();
  }
  buffer.check();
  buffer.destroy();
}

}  // namespace deep_ep::test
