#include "tests/rxe/low_latency_ranks.hpp"

#include <vector>

#include "tests/cluster/low_latency_combine_case.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

constexpr std::int64_t kTokens = 6;
constexpr std::int64_t kHidden = 512;

std::vector<std::int64_t> tokens_of(int ranks) {
  std::vector<std::int64_t> tokens;
  for (int rank = 0; rank < ranks; ++rank) tokens.push_back(rank == 1 ? 0 : kTokens - rank);
  return tokens;
}

void dispatch_fp8(Rank& rank, Buffer& buffer, std::uint64_t seed) {
  const LowLatencyCase one =
      make_low_latency_case({.tokens = tokens_of(rank.size()), .max_tokens = kTokens, .hidden = kHidden, .seed = seed});
  const LowLatencyDispatchResult result = buffer.low_latency_dispatch(upload_arguments(rank, one), rank.call());
  check_low_latency_dispatch(rank, one, result);
}

void dispatch_and_combine(Rank& rank, Buffer& buffer, std::uint64_t seed, int rails_of) {
  LowLatencyCombineCase one = make_low_latency_combine_case({.tokens = tokens_of(rank.size()),
                                                             .max_tokens = kTokens,
                                                             .hidden = kHidden,
                                                             .routing = oracle::Routing::some_dropped,
                                                             .seed = seed});
  one.options.ranks_per_node = rails_of;
  const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
  const LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
  const auto expected = one.expected();
  for (int again = 0; again < 2; ++again) {
    const Tensor combined = buffer.low_latency_combine(arguments, rank.call()).combined_x;
    check_low_latency_combine(rank, one, expected, combined.view());
  }
}

}  // namespace

void run_low_latency_calls(const std::shared_ptr<Bootstrap>& bootstrap, int rails_of) {
  const ClusterOptions options{
      .ranks = bootstrap->size(), .where = {}, .host = {.multiprocessors = 2}, .timeout_s = long_patience()};
  Rank rank(bootstrap->rank(), options, bootstrap, make_host_executor(options.host));
  BufferOptions buffer_options = low_latency_options(rank.size(), kTokens, kHidden);
  // Left to the library, a slow device would have rails, which round otherwise.
  if (rails_of == 0) buffer_options.low_latency.rails = LowLatencyRails::never;
  Buffer& buffer = rank.buffer(buffer_options);
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    dispatch_fp8(rank, buffer, seed);
    dispatch_and_combine(rank, buffer, seed + 10, rails_of);
    buffer.low_latency_clean(rank.call().stream);
    rank.release();
  }
  buffer.check();
  buffer.destroy();
}

}  // namespace deep_ep::test
