// The blocks of the second interface's dispatch that number selections, while rows travel. They touch memory of their
// own device only.
//
// Every rank has the selections of all ranks. Tokens are counted one after the other, by source: the row of a token at
// a rank is how many tokens before it have an expert there. So a rank finds the places of the rows that come, and those
// of its own tokens' rows at their owners, without asking anybody.
#pragma once

#include "kernels/elastic/dispatch_params.hpp"
#include "kernels/normal/meet.hpp"
#include "kernels/rows/numbering.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE Meeting dispatch_meeting(const ElasticDispatchParams& params, std::uint64_t epoch) {
  return {params.common, {params.wait}, Wanted::dispatch_addresses, MeetingKind::dispatch, epoch};
}

/// The tokens whose selections all ranks have told.
struct ToldTokens {
  static constexpr bool kOfAllRanks = true;

  const ElasticDispatchParams& params;
  std::uint64_t epoch;

  DEEP_EP_DEVICE int num_ranks() const { return params.common.num_ranks; }

  /// Waits for the selections of all ranks, and learns how many tokens each has. False after a fault, and if ranks do
  /// not mean the same call (`agree`), which the kernel's last block reports.
  DEEP_EP_DEVICE bool await_selections(const NumberingShared& shared, bool& agree) const {
    const Meeting meeting = dispatch_meeting(params, epoch);
    // First until all have come: a rank tells nothing before, and is not to blame for one that does not come.
    bool good = meeting.hear_all({}, false), same = true;
    if (!block::all(good)) return false;
    block::each(num_ranks(), [&](int peer) {
      good = wait_signal(params.wait, params.common.signal_from(peer, IntranodeSignal::selections),
                         {peer, Wanted::counts, epoch}) &&
             good;
      if (!good) return;
      const ToldSelections::Shape& theirs = params.told.shape(params.common.own_heap(), peer, epoch);
      shared.source_ends[peer] = static_cast<std::int32_t>(theirs.num_tokens);
      same = difference(params.shape.word, theirs.word).at < 0 && same;
    });
    if (block::all(good && same)) return true;
    agree = !block::all(good);  // else nothing is known of those that have not told
    return false;
  }

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

  /// By a whole block. False if ranks do not mean the same call.
  DEEP_EP_DEVICE bool number(std::byte* memory) const {
    const NumberingShared shared(Carver(memory), params.numbers, kOfAllRanks);
    bool agree = true;
    if (!await_selections(shared, agree)) return agree;
    if (warp_index() == 0) {  // where the tokens of each source end
      std::int32_t* const ends = shared.source_ends;
      running_sums(
          num_ranks(), [=](int source) { return ends[source]; },
          [=](int source, std::int32_t end) { ends[source] = end; });
    }
    SelectionNumberer<ToldTokens>{*this, params.numbers, shared, params.wait, epoch}.number();
    return true;
  }
};

}  // namespace deep_ep::device
