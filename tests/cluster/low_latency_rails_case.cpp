#include "tests/cluster/low_latency_rails_case.hpp"

#include <algorithm>
#include <utility>

#include "tests/support/time_scale.hpp"

namespace deep_ep::test {

BufferOptions rail_options(const Nodes& nodes, std::int64_t max_tokens, std::int64_t hidden, double timeout_s) {
  BufferOptions options = low_latency_options(nodes.ranks, max_tokens, hidden, timeout_s);
  options.ranks_per_node = nodes.ranks_per_node;
  return options;
}

void combine_twice(Rank& rank, Buffer& buffer, const LowLatencyCombineCase& one, const Combined& expected,
                   const LowLatencyHandle& handle, int num_sms) {
  LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
  arguments.num_sms = num_sms;
  const LowLatencyCombineResult first = buffer.low_latency_combine(arguments, rank.call());
  const LowLatencyCombineResult again = buffer.low_latency_combine(arguments, rank.call());
  check_low_latency_combine(rank, one, expected, first.combined_x.view());
  check_low_latency_combine(rank, one, expected, again.combined_x.view());
}

void run_combines(const ClusterOptions& cluster, const Nodes& nodes, const std::vector<LowLatencyCombineCase>& cases,
                  const std::vector<int>& sms) {
  std::int64_t max_tokens = 1;
  std::int64_t hidden = 1;
  std::vector<Combined> expected;
  for (const LowLatencyCombineCase& one : cases) {
    max_tokens = std::max(max_tokens, one.before.shape.max_tokens);
    hidden = std::max({hidden, one.hidden, one.before.shape.hidden});
    expected.push_back(one.expected(nodes.ranks_per_node));
  }
  run_with_buffers(cluster, rail_options(nodes, max_tokens, hidden), [&](Rank& rank, Buffer& buffer) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const LowLatencyCombineCase& one = cases[i];
      const auto dispatched = dispatch_and_check(rank, buffer, one.before);
      combine_twice(rank, buffer, one, expected[i], dispatched.handle, sms[i % sms.size()]);
      const auto hooked = with_hook(upload_combine(rank, one, dispatched.handle));
      const Tensor combined = received(buffer.low_latency_combine(hooked, rank.call())).combined_x;
      check_low_latency_combine(rank, one, expected[i], combined.view());
      rank.release();
    }
    buffer.check();
  });
}

}  // namespace deep_ep::test
