#include "tests/cluster/low_latency_rails_case.hpp"

#include <algorithm>
#include <utility>

#include "tests/support/time_scale.hpp"

namespace deep_ep::test {

RailCase make_rail_case(LowLatencyCombineCase calls, const Nodes& nodes) {
  calls.options.ranks_per_node = nodes.ranks_per_node;
  Combined by_rails = calls.expected();
  calls.options.ranks_per_node = 0;
  Combined direct = calls.expected();
  return {.calls = std::move(calls), .by_rails = std::move(by_rails), .direct = std::move(direct)};
}

RailCase make_rail_case(const LowLatencyCaseShape& shape, const Nodes& nodes, std::int64_t hidden) {
  return make_rail_case(make_low_latency_combine_case(shape, hidden), nodes);
}

LowLatencyCase select_nodes(const LowLatencyCase& one, const Nodes& nodes,
                            const std::function<bool(int, int)>& allowed) {
  LowLatencyCase result = one;
  oracle::Random random(oracle::derive_seed(one.shape.seed, 1000));
  for (int rank = 0; rank < nodes.ranks; ++rank) {
    std::vector<std::int64_t> experts;
    for (int expert = 0; expert < one.shape.experts(); ++expert) {
      if (allowed(nodes.node_of(rank), nodes.node_of(expert / one.shape.local_experts))) experts.push_back(expert);
    }
    oracle::Selection& selection = result.inputs[static_cast<std::size_t>(rank)].selection;
    for (std::int64_t token = 0; token < selection.tokens; ++token) {
      std::vector<std::int64_t> left = experts;
      for (int k = 0; k < selection.topk; ++k) {
        std::int64_t& entry = selection.idx[static_cast<std::size_t>(token * selection.topk + k)];
        entry = -1;
        if (left.empty()) continue;
        const auto which = left.begin() + random.below(static_cast<std::int64_t>(left.size()));
        entry = *which;
        left.erase(which);
      }
    }
  }
  return with_masks(result, {});
}

BufferOptions rail_options(const Nodes& nodes, std::int64_t max_tokens, std::int64_t hidden, double timeout_s) {
  BufferOptions options = low_latency_options(nodes.ranks, max_tokens, hidden, timeout_s);
  options.ranks_per_node = nodes.ranks_per_node;
  return options;
}

void combine_both_ways(Rank& rank, Buffer& buffer, const LowLatencyCombineCase& one, const Combined& expected,
                       const LowLatencyHandle& handle, int num_sms) {
  LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
  arguments.num_sms = num_sms;
  const LowLatencyCombineResult uploaded = buffer.low_latency_combine(arguments, rank.call());
  if (one.hidden == one.before.shape.hidden) {
    const TensorView memory = buffer.low_latency_combine_buffer(handle);
    rank.executor()->copy(memory.data, arguments.x.data, memory.bytes(), rank.stream());
    arguments.x = memory;
  }
  const LowLatencyCombineResult in_place = buffer.low_latency_combine(arguments, rank.call());
  check_low_latency_combine(rank, one, expected, uploaded.combined_x.view());
  check_low_latency_combine(rank, one, expected, in_place.combined_x.view());
}

void run_combines(const ClusterOptions& cluster, const Nodes& nodes, const std::vector<LowLatencyCombineCase>& all,
                  const std::vector<int>& sms) {
  std::int64_t max_tokens = 1;
  std::int64_t hidden = 1;
  std::vector<RailCase> cases;
  for (const LowLatencyCombineCase& one : all) {
    max_tokens = std::max(max_tokens, one.before.shape.max_tokens);
    hidden = std::max({hidden, one.hidden, one.before.shape.hidden});
    cases.push_back(make_rail_case(one, nodes));
  }
  run_with_buffers(cluster, rail_options(nodes, max_tokens, hidden), [&](Rank& rank, Buffer& buffer) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const LowLatencyCombineCase& one = cases[i].calls;
      const auto dispatched = dispatch_and_check(rank, buffer, one.before);
      combine_both_ways(rank, buffer, one, cases[i].by_rails, dispatched.handle, sms[i % sms.size()]);
      if (nodes.ranks_per_node != 0) {
        const auto hooked = with_hook(upload_combine(rank, one, dispatched.handle));
        const Tensor combined = received(buffer.low_latency_combine(hooked, rank.call())).combined_x;
        check_low_latency_combine(rank, one, cases[i].direct, combined.view());
      }
      rank.release();
    }
    buffer.check();
  });
}

}  // namespace deep_ep::test
