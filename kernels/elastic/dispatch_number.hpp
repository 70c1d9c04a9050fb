// The blocks of the second interface's dispatch that number selections, while rows travel. They touch memory of their
// own device only.
//
// Every rank has the selections of all ranks. Tokens are counted one after the other, by source: the row of a token is
// how many tokens before it have an expert of this rank. So a rank finds the places of the rows that come without
// asking another rank.
#pragma once

#include "kernels/elastic/dispatch_params.hpp"
#include "kernels/rows/numbering.hpp"

namespace deep_ep::device {

/// The tokens whose selections all ranks have told.
struct ToldTokens {
  static constexpr bool kOfAllRanks = true;

  const ElasticDispatchParams& params;
  std::uint64_t epoch;
  NumberingShared shared;  ///< of a block that numbers

  DEEP_EP_DEVICE int num_ranks() const { return params.common.num_ranks; }

  DEEP_EP_DEVICE int local(const Selection& selection) const {
    const std::int64_t at = std::int64_t{selection.token} * params.rows.num_topk + selection.k;
    const int expert =
        params.told.apart()
            ? reinterpret_cast<const std::int16_t*>(shared.few)[selection.source * params.numbers.few + at]
            : load_weak(params.told.of(params.common.own_heap(), selection.source, epoch) + at);
    return expert_of(expert - params.common.rank * params.numbers.num_experts, params.numbers.num_experts);
  }
  DEEP_EP_DEVICE std::int32_t token_at_source(const Selection& selection) const { return selection.token; }
  DEEP_EP_DEVICE void tell_host(const SelectionNumberer<ToldTokens>& numberer) const {
    if (params.host_counts == nullptr) return;
    HostCounts& host = *params.host_counts;
    const std::int32_t* const totals = numberer.shared.totals;
#pragma unroll 1
    for (int expert = lane_index(); expert < params.numbers.num_experts; expert += kWarpSize) {
      host.tokens_per_expert[expert] = align_up(totals[expert], params.numbers.alignment);
    }
    if (lane_index() == 0) host.num_recv_tokens = numberer.end_of(num_ranks() - 1);
    warp::sync();
    if (lane_index() == 0) store_release<Scope::system>(&host.epoch, epoch);
  }

  /// By all threads of a block: the few selections of all ranks come to shared memory. False after a fault that this
  /// thread has met.
  DEEP_EP_DEVICE bool fetch_few() const {
    constexpr int kTogether = 4;
    const Divisor& cells = params.told.cells;
    const int end = num_ranks() * cells;
    bool good = true;
#pragma unroll 1
    for (int first = thread_index(); first < end; first += kTogether * block_threads()) {
      Awaited awaited{0, Wanted::counts, epoch};  // the rank of a cell that is missing
      const auto arrived = [&](Poll& poll) {
        Cell cell[kTogether];
        bool all = true;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int at = first + i * block_threads();
          if (at < end) cell[i] = load_cell(params.told.cell(params.common.own_heap(), at / cells, at % cells, epoch));
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int at = first + i * block_threads();
          if (at >= end) break;
          shared.few[at] = cell[i].payload;
          if (cell[i].epoch >= epoch) continue;
          all = false;
          awaited.peer = at / cells;
          poll.seen = cell[i].epoch;
        }
        return all;
      };
      good = good && wait_until(ReportLate{params.common.wait}, awaited, arrived);
    }
    return good;
  }

  /// By a whole block, when it is known how many tokens each source has.
  DEEP_EP_DEVICE void number() const {
    const SelectionNumberer<ToldTokens> numberer{*this, params.numbers, shared, params.common.wait};
    // Nothing of this needs selections, so they are awaited behind it.
    numberer.clear();
    if (warp_index() == 0) {  // where the tokens of each source end
      std::int32_t* const ends = shared.source_ends;
      running_sums(
          num_ranks(), [=](int source) { return ends[source]; },
          [=](int source, std::int32_t end) { ends[source] = end; });
    }
    bool good = true;
    if (params.told.apart()) {
      good = fetch_few();
    } else {
      block::each(num_ranks(), [&](int peer) {
        good = wait_signal(params.common.wait, params.common.signal_from(peer, IntranodeSignal::selections),
                           {peer, Wanted::counts, epoch}) &&
               good;
      });
    }
    if (block::all(good)) numberer.number();
  }
};

}  // namespace deep_ep::device
