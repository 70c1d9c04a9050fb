// Rows of combine that nobody adds up on their way: how calls with hooks send them, which are two launches.
//
// The send part of a call in one launch has to know the owner's selections and weights, so it waits until every owner
// has begun. A send part by itself must not: it sends every row that the dispatch brought, as the expert left it, and
// the owner multiplies and adds when it receives. Nobody announces selections, and nobody who is late holds up what
// others send.
//
//   - The rows of a token lie in the owner's part of the window for combine's rows of all ranks together, one for each
//     selection of the dispatch: [token][selection].
//   - A row's tags say which expert it is of: an owner that selects another one does not take it.
//   - Who has sent all its rows tells all ranks so, and which call that was (sent()). A receive part ends when
//     everybody has. So when a rank acknowledges a call, no row of it is under way any more, not even one that the rank
//     did not want; and whoever finds that acknowledgement may write wherever rows of combine lie, two calls later.
//   - A sender writes to an owner when that has acknowledged the call before the last. That is all it waits for.
//   - A rank acknowledges at the end of its receive part, and not only when its next call begins, as elsewhere: with
//     two calls in flight that next call is the very one whose rows would wait for it.
//
// For ranks that all reach each other by NVLink, without masking, where the rows fit the window. Other calls with hooks
// send as calls in one launch do. (A masked rank that comes late would write into places of others; what posters and
// relays post are sums.)
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/low_latency/combine/announce.hpp"
#include "kernels/low_latency/transport/reach.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::low_latency {

struct UnreducedReach : CombineReach<false, false> {
  using CombineReach<false, false>::CombineReach;

  /// With a rank instead of an expert: that rank's dispatch had no room for the row. Its lines are there all the same,
  /// and count for nothing.
  static constexpr std::uint32_t kNoRow = 0x10000;
  static_assert(kMostLowLatencyExperts < static_cast<int>(kNoRow) && kMaxRanks <= static_cast<int>(kNoRow));

  /// What is written into the lines of a row of `expert`; without a row: kNoRow | rank. Never
  /// what a call in one launch would write, so that nobody takes a row for a sum.
  DEEP_EP_DEVICE std::uint64_t tag(std::uint32_t expert) const {
    return std::uint64_t{expert} << 47 | std::uint64_t{1} << 46 | epoch;
  }

  /// Row of the dispatch's selection `k` of `token`, in the heap of the token's owner.
  DEEP_EP_DEVICE std::byte* row_in_turn(std::byte* heap, int num_topk, int token, int k) const {
    return row(heap, 0, token * num_topk + k);
  }

  /// Tells `peer` that this rank has sent all its rows of the call, releasing them, and which call (call_of()). By the
  /// last to arrive at a ticket, who has acquired what all others sent.
  DEEP_EP_DEVICE void tell_sent(int peer, std::uint32_t call) const {
    std::uint64_t* word = sent_word(common.rank).in(common.heaps[peer]);
    store_release<Scope::system>(word, epoch << 32 | call);
  }
  /// By one thread: has `peer` sent all its rows? Acquires them, and says which call it meant.
  DEEP_EP_DEVICE bool has_sent(int peer, std::uint32_t& call) const {
    const std::uint64_t word = load_acquire<Scope::system>(sent_word(peer).in(common.local));
    call = static_cast<std::uint32_t>(word);
    return word >> 32 == (epoch & 0xffffffffu);
  }
  /// Has `peer` announced selections? Then it takes this call for one in one launch.
  DEEP_EP_DEVICE bool has_announced_cells(int peer) const {
    return Selection::epoch_in(load_cell(selections(peer, 0))) == epoch;
  }

 private:
  /// A word of each source for even and for odd epochs, which only far ranks use otherwise.
  DEEP_EP_DEVICE Place<std::uint64_t> sent_word(int source) const {
    return common.window.progress(LowLatencyKind::combine, epoch, source, 0);
  }
};

/// Asks what ranks have said of the call.
struct UnreducedSurvey {
  const LowLatencyCombineParams& params;
  const UnreducedReach& reach;
  int disagrees = -1;        ///< the first rank that means another one
  int unsent = -1;           ///< the first that has not sent everything
  std::uint32_t theirs = 0;  ///< what `disagrees` means

  /// By one warp of the rank: waits until everybody has sent all its rows, and all mean the same call.
  DEEP_EP_DEVICE void await_all_sent() const {
    const std::uint32_t ours = call_of(params);
#pragma unroll 1
    for (int peer = lane_index(); peer < params.common.num_ranks; peer += kWarpSize) {
      std::uint32_t said = 0;
      bool differs = false;
      const auto told = [&](const Poll&) {
        if (reach.has_sent(peer, said)) return true;
        differs = reach.has_announced_cells(peer);
        return differs;
      };
      if (!wait_until(reach.policy(), {peer, Wanted::low_latency_combine_rows, reach.epoch}, told)) continue;
      if (differs || said != ours) refuse_call(params.common, reach.epoch, peer, 0, ours, said);
    }
  }

  /// By a whole warp, of the row of `expert` of `rank`, which does not come: had the dispatch no room for it? Once its
  /// rank has sent everything, either it is here, or there was no room, or another expert's lies there. Or a rank that
  /// means another call, with rows of another size, has written where it lay; so nobody is blamed for a row that is not
  /// there before all have said which call they mean.
  DEEP_EP_DEVICE bool has_no_row(int token, int expert, int rank, const std::byte* row, std::uint64_t begin) {
    const std::uint32_t ours = call_of(params);
    unsent = rank;
    bool sent = false;
    if (lane_index() == 0) {
      sent = reach.has_sent(rank, theirs);
      if (sent ? theirs != ours : reach.has_announced_cells(rank)) disagrees = rank;
    }
    sent = warp::any(sent && disagrees < 0);
    warp::sync();  // what other lanes read comes after the rank's word
    bool found_here = false;
    if (sent) {
      std::uint64_t seen = 0;
      if (lane_index() == 0)
        seen = load_acquire<Scope::system>(reinterpret_cast<const std::uint64_t*>(row + kTaggedPayload));
      found_here = warp::any(seen == reach.tag(static_cast<std::uint32_t>(expert)));
      if (warp::any(seen == reach.tag(UnreducedReach::kNoRow | static_cast<std::uint32_t>(rank)))) return true;
      ask_all(ours);
    }
    if (lane_index() == 0) {
      const bool other = disagrees < 0 && unsent < 0 && !found_here;  // another expert's row lies there
      if (disagrees >= 0 || other) {
        refuse_call(params.common, reach.epoch, other ? rank : disagrees, other ? 2 : 0,
                    other ? static_cast<std::uint32_t>(expert) : ours,
                    other ? static_cast<std::uint32_t>(token) : theirs);
      } else {
        const Awaited rows{unsent < 0 ? rank : unsent, Wanted::low_latency_combine_rows, reach.epoch};
        if (reach.policy().is_late(rows, begin)) reach.policy().blame(rows, 0);
      }
    }
    warp::sync();
    return false;
  }

 private:
  /// By a whole warp.
  DEEP_EP_DEVICE void ask_all(std::uint32_t ours) {
    disagrees = unsent = -1;
#pragma unroll 1
    for (int first = 0; first < params.common.num_ranks; first += kWarpSize) {
      const int peer = first + lane_index();
      bool sent = true;
      bool differs = false;
      std::uint32_t said = 0;
      if (peer < params.common.num_ranks) {
        sent = reach.has_sent(peer, said);
        differs = sent ? said != ours : reach.has_announced_cells(peer);
      }
      const std::uint32_t odd = warp::ballot(differs);
      const std::uint32_t missing = warp::ballot(!sent);
      said = warp::shuffle(said, odd == 0 ? 0 : lowest_bit(odd));
      if (disagrees < 0 && odd != 0) {
        disagrees = first + lowest_bit(odd);
        theirs = said;
      }
      if (unsent < 0 && missing != 0) unsent = first + lowest_bit(missing);
    }
  }
};

/// By all threads of all blocks, when their warps have done their part `phase` of the call. True in the one warp, in
/// all lanes, that comes last and speaks for the rank; in none if the call is over. It also counts the call: all blocks
/// know by then which it is. What others wrote in a send part is ordered before, and what they read in a receive part.
DEEP_EP_DEVICE bool last_warp_to_finish(const LowLatencyParams& common, const LowLatencyEpochs& epochs,
                                        LowLatencyPhase phase) {
  block::sync();
  if (warp_index() != 0) return false;
  bool speaks = false;
  if (lane_index() == 0) {
    LowLatencyCounters& counters = common.counters(LowLatencyKind::combine);
    const auto blocks = static_cast<std::uint32_t>(grid_blocks());
    const bool last = sends(phase) ? last_to_arrive<Scope::system>(&counters.finished, blocks)
                                   : last_to_arrive<Scope::gpu>(&counters.finished, blocks);
    if (last && sends(phase)) counters.sent.count(epochs.send);
    if (last && !sends(phase)) counters.received.count(epochs.receive);
    speaks = last && !aborted(common.wait);
  }
  speaks = warp::any(speaks);
  warp::sync();
  return speaks;
}

}  // namespace deep_ep::device::low_latency
