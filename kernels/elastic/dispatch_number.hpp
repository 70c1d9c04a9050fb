// The blocks of the second interface's dispatch that number selections, while rows travel. They touch memory of their
// own device only.
//
// Every rank has the selections of all ranks. Tokens are counted one after the other, by source: the row of a token is
// how many tokens before it have an expert of this rank. So a rank finds the places of the rows that come without
// asking another rank.
#pragma once

#include "kernels/elastic/params.hpp"
#include "kernels/rows/numbering.hpp"

namespace deep_ep::device {

/// The tokens whose selections all ranks have told.
struct ToldTokens {
  static constexpr bool kOfAllRanks = true;

  const ElasticDispatchParams& params;
  std::uint64_t epoch;
  NumberingShared shared;  ///< of a block that numbers

  DEEP_EP_DEVICE int num_ranks() const { return params.common.num_ranks; }

  DEEP_EP_DEVICE void find(Selection& selection, bool& good) const {
    const IntranodeParams& common = params.common;
    selection.token = selection.position - (selection.source == 0 ? 0 : shared.source_ends[selection.source - 1]);
    const std::int64_t at = std::int64_t{selection.token} * params.rows.num_topk + selection.k;
    const std::int32_t* const told = params.told.of(common.own_heap(), selection.source, epoch);
    int expert = -1;
    if (params.told.apart()) {
      constexpr int kOfCell = ToldSelections::kOfCell;
      const auto arrived = [&](Poll& poll) {
        const Cell cell = load_cell(reinterpret_cast<const Cell*>(told) + at / kOfCell);
        expert = static_cast<std::int16_t>(cell.payload >> at % kOfCell * 16);
        poll.seen = cell.epoch;
        return cell.epoch >= epoch;
      };
      good = wait_until(ReportLate{common.wait}, {selection.source, Wanted::counts, epoch}, arrived) && good;
    } else {
      expert = load_weak(told + at);
    }
    selection.local = expert_of(expert - common.rank * params.numbers.num_experts, params.numbers.num_experts);
  }
  DEEP_EP_DEVICE void tell_host(const SelectionNumberer<ToldTokens>& numberer) const {
    if (params.host_counts == nullptr) return;
    HostCounts& host = *params.host_counts;
    warp::each(params.numbers.num_experts, [&](int expert) {
      host.tokens_per_expert[expert] = align_up(shared.totals[expert], params.numbers.alignment);
    });
    if (lane_index() == 0) host.num_recv_tokens = numberer.end_of(num_ranks() - 1);
    warp::sync();
    if (lane_index() == 0) store_release<Scope::system>(&host.epoch, epoch);
  }

  /// By a whole block, when it is known how many tokens each source has.
  DEEP_EP_DEVICE void number() const {
    if (warp_index() == 0) {  // where the tokens of each source end
      std::int32_t* const ends = shared.source_ends;
      running_sums(
          num_ranks(), [=](int source) { return ends[source]; },
          [=](int source, std::int32_t end) { ends[source] = end; });
    }
    bool good = true;
    block::each(params.told.apart() ? 0 : num_ranks(), [&](int peer) {
      good = wait_signal(params.common.wait, params.common.signal_from(peer, IntranodeSignal::selections),
                         {peer, Wanted::counts, epoch}) &&
             good;
    });
    SelectionNumberer<ToldTokens>{*this, params.numbers, shared, params.common.wait}.number(good);
  }
};

}  // namespace deep_ep::device
