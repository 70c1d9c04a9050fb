// The blocks of the second interface's dispatch that number selections, while rows travel. They touch memory of their
// own device only.
//
// Every rank has the selections of all ranks. Tokens are counted one after the other, by source: the row of a token at
// a rank is how many tokens before it have an expert there. So a rank finds the places of the rows that come, and those
// of its own tokens' rows at their owners, without asking anybody.
#pragma once

#include "kernels/elastic/dispatch_params.hpp"
#include "kernels/rows/numbering.hpp"

namespace deep_ep::device {

/// The tokens whose selections all ranks have told.
struct ToldTokens {
  static constexpr bool kOfAllRanks = true;

  const ElasticDispatchParams& params;
  std::uint64_t epoch;
  std::byte* memory;  ///< shared, of a block that numbers

  DEEP_EP_DEVICE NumberingShared shared() const { return {Carver(memory), params.numbers, kOfAllRanks}; }
  DEEP_EP_DEVICE int num_ranks() const { return params.common.num_ranks; }

  DEEP_EP_DEVICE std::int32_t expert(const Selection& selection) const {
    return load_weak(params.told.of(params.common.own_heap(), selection.source, epoch) +
                     std::int64_t{selection.token} * params.rows.num_topk + selection.k);
  }
  DEEP_EP_DEVICE std::int32_t token_at_source(const Selection& selection) const { return selection.token; }
  DEEP_EP_DEVICE void tell_host(const SelectionNumberer<ToldTokens>& numberer) const {
    if (params.host_counts == nullptr) return;
    HostCounts& host = *params.host_counts;
    const std::int32_t* const totals = numberer.shared.totals;
#pragma unroll 1
    for (int expert = lane_index(); expert < params.numbers.num_experts; expert += kWarpSize) {
      host.tokens_per_expert[expert] = align_up(totals[numberer.column_of_expert(expert)], params.numbers.alignment);
    }
    if (lane_index() == 0) host.num_recv_tokens = totals[params.common.rank];
    warp::sync();
    if (lane_index() == 0) store_release<Scope::system>(&host.epoch, epoch);
  }

  /// By a whole block, when it is known how many tokens each source has.
  DEEP_EP_DEVICE void number() const {
    const NumberingShared counters = shared();
    const SelectionNumberer<ToldTokens> numberer{*this, params.numbers, counters, params.wait, epoch};
    // Nothing of this needs selections, so they are awaited behind it.
    numberer.clear();
    if (warp_index() == 0) {  // where the tokens of each source end
      std::int32_t* const ends = counters.source_ends;
      running_sums(
          num_ranks(), [=](int source) { return ends[source]; },
          [=](int source, std::int32_t end) { ends[source] = end; });
    }
    bool good = true;
    block::each(num_ranks(), [&](int peer) {
      good = wait_signal(params.wait, params.common.signal_from(peer, IntranodeSignal::selections),
                         {peer, Wanted::counts, epoch}) &&
             good;
    });
    if (block::all(good)) numberer.number();
  }
};

}  // namespace deep_ep::device
