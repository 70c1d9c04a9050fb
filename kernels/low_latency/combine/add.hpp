// The owner's side of combine: the rows that a token's sum is made of, its terms, are added in fp32 and rounded once.
//
//   in one launch   a term is a rank's row, which is a sum already; in the order of the ranks
//   by rails        another node has one such row, which the owner's rail there adds up from those of its node
//   with hooks      a term is a selection's row as its expert left it, times its weight; in the order of the selections
//
// A block takes a token, and its warps share the token's lines; with hooks and few tokens, two blocks. Each warp finds
// out for itself which terms there are, and polls its lines of all of them at once: they are in its registers as soon
// as they have arrived.
#pragma once

#include <type_traits>

#include "kernels/common/line_poller.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::low_latency {

/// The reach of combine where rows travel as the experts left them: see unreduced.cu.
struct UnreducedReach : CombineReach<false> {
  using CombineReach<false>::CombineReach;

  /// With a rank instead of an expert: that rank's dispatch had no room for the row. Its lines are there all the same,
  /// and count for nothing.
  static constexpr std::uint32_t kNoRow = 0x10000;
  static_assert(kMostLowLatencyExperts < static_cast<int>(kNoRow) && kMaxRanks <= static_cast<int>(kNoRow));

  /// What is written into the lines of a row of `expert`; without a row: kNoRow | rank. Never what a call in
  /// one launch would write, so that nobody takes a row for a sum.
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

/// The terms of a token's sum: lane i < count holds the i-th.
struct CombineTerms {
  int count = 0;
  int rank = -1;        ///< whose row it is
  int expert = 0;       ///< unreduced
  float weight = 1.0f;  ///< unreduced
  bool first_of_rank = true;
  const std::byte* row = nullptr;
  std::uint32_t gone = 0;  ///< in each lane bit i: the i-th term does not come
};

/// Whose tokens a rank adds up: its own, or, by rails, those of a rank of another node. Then it adds up the rows of its
/// own node, and that rank gets the sum.
struct CombineTask {
  int owner;
  int num_tokens;  ///< negative: the call is over
  bool relays;
};

template <bool kRdma, bool kUnreduced = false>
struct CombineAdder {
  using Reach = std::conditional_t<kUnreduced, UnreducedReach, CombineReach<kRdma>>;
  static constexpr int kTogether = 8;  ///< rows that are polled at once, four lines of each
  using Lines = LinePoller<kTogether>;

  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  Reach reach;
  int member, members;       ///< this warp, of those that share a token
  LoadedSelection loaded{};  ///< unreduced: the lane's of one token, loaded before the call was known
  int loaded_token = -1;

  /// Adds up every `step`-th token from `first` on. By rails first the tokens of other nodes' ranks, whose sums have
  /// further to go.
  DEEP_EP_DEVICE void add_all(int first, int step) const {
#pragma unroll 1
    for (int turn = 1; turn <= reach.num_nodes(); ++turn) {
      CombineTask task{params.common.rank, params.num_tokens, false};
      if constexpr (kRdma) {
        if (turn != reach.num_nodes()) {
          const int owner = reach.rail_in((reach.own_node() + turn) % reach.num_nodes());
          task = {owner, FarSelections{params, reach.far_selections(owner)}.await_count(reach, owner), true};
        }
      }
      if (!add_tokens(task, first, step)) return;
    }
  }

 private:
  /// The task's tokens among these. False: the call is over.
  DEEP_EP_DEVICE bool add_tokens(const CombineTask& task, int first, int step) const {
#pragma unroll 1
    for (int token = first; token < task.num_tokens; token += step) {
      CombineTerms terms = find_terms(task, token);
#pragma unroll 1
      while (!await_rows(token, terms)) {
        if (warp::any(aborted(params.common.wait))) return false;
        terms = find_terms(task, token);  // without those that are masked now
      }
      if (!add_lines(task, token, terms)) return false;
    }
    return task.num_tokens >= 0;
  }

  /// Waits for the rows whose tags cannot be trusted. False if one does not come.
  DEEP_EP_DEVICE bool await_rows(int token, const CombineTerms& terms) const {
    if (!kRdma) return true;
    bool there = true;
    if (terms.rank >= 0) {
      const std::int64_t begin = clock_cycles();
      const bool far = reach.is_far(terms.rank);
      there = !far || reach.await_progress(terms.rank, token + 1, Wanted::low_latency_combine_rows);
      if (measures(member) && far) add_relaxed<Scope::gpu>(params.wait_cost + terms.rank, clock_cycles() - begin);
    }
    return warp::agree(there);
  }

  /// In each lane the rank whose row the lane's selection of the token is a part of; -1: of none. By rails an owner has
  /// one row for all ranks of another node, and a relay adds those of its own.
  DEEP_EP_DEVICE int rank_of_selection(const CombineTask& task, int token) const {
    const int lane = lane_index();
    if (lane >= params.num_topk) return -1;
    if constexpr (kRdma) {
      if (task.relays) {
        const int rank = FarSelections{params, reach.far_selections(task.owner)}.rank_of_selection(token, lane);
        return rank >= 0 && reach.is_of_own_node(rank) ? rank : -1;
      }
    }
    return reach.speaker_of(Selections{params}.rank_of_selection(token, lane));
  }

  DEEP_EP_DEVICE CombineTerms find_terms(const CombineTask& task, int token) const {
    const int lane = lane_index();
    int expert = -1;
    float weight = 1.0f;
    int rank = -1;
    if constexpr (kUnreduced) {
      if (lane < params.num_topk) {
        const Selections selections{params};
        const LoadedSelection now = token == loaded_token ? loaded : selections.load(token, lane);
        if (member == 0) selections.report_unknown(now, token);
        expert = selections.expert_of(now.index);
        rank = selections.rank_of(expert);
        weight = now.weight;
      }
    } else {
      rank = rank_of_selection(task, token);
    }

    // If a rank has one row, its first selection stands for that row. Terms are in the order of ranks then.
    const bool first = lowest_bit(warp::match_any(static_cast<std::uint32_t>(rank))) == lane;
    const std::uint32_t wanted = warp::ballot(rank >= 0 && (first || kUnreduced) && !masked(params.common, rank));
    int place = kUnreduced ? count_bits(wanted & ((1u << lane) - 1)) : 0;
#pragma unroll 1
    for (std::uint32_t left = kUnreduced ? 0 : wanted; left != 0; left &= left - 1) {
      place += warp::shuffle(rank, lowest_bit(left)) < rank ? 1 : 0;
    }
    CombineTerms terms{.count = count_bits(wanted)};
    int selection = 0;  // that the lane's term is
#pragma unroll 1
    for (std::uint32_t left = wanted; left != 0; left &= left - 1) {
      if (warp::shuffle(place, lowest_bit(left)) == lane) selection = lowest_bit(left);
    }
    const int its_rank = warp::shuffle(rank, selection);
    if constexpr (kUnreduced) {
      terms.expert = warp::shuffle(expert, selection);
      terms.weight = warp::shuffle(weight, selection);
      const std::uint32_t of_term = lane < terms.count ? static_cast<std::uint32_t>(its_rank) : ~0u;
      terms.first_of_rank = lowest_bit(warp::match_any(of_term)) == lane;
    }
    if (lane >= terms.count) return terms;
    terms.rank = its_rank;
    if constexpr (kUnreduced) {
      terms.row = reach.row_in_turn(params.common.local, params.num_topk, token, selection);
    } else {
      terms.row = reach.row(params.common.local, its_rank, token);
    }
    if constexpr (kRdma) {
      if (task.relays) terms.row = reach.row_of_member(params.common.local, task.owner, its_rank, token);
    }
    return terms;
  }

  /// Adds up this warp's lines of the token. False: the call is over.
  DEEP_EP_DEVICE bool add_lines(const CombineTask& task, int token, CombineTerms& terms) const {
    const LineLane lane;
#pragma unroll 1
    for (int unit = member; unit < wire.pieces(); unit += members) {
      const auto line = static_cast<std::uint32_t>(unit * kWarpLines + lane.line);
      LineSum sum;
#pragma unroll 1
      for (int first = 0; first < terms.count; first += kTogether) {
        Lines lines;
        if (!await(token, terms, first, line, measures(unit), lines)) return false;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first + i >= terms.count || (terms.gone >> (first + i) & 1u) != 0) continue;
          if constexpr (kUnreduced) {
            sum.add_weighted(lines.part[i], warp::shuffle(terms.weight, first + i));
          } else {
            sum.add(lines.part[i]);
          }
        }
      }
      if constexpr (kRdma) {
        if (task.relays) {
          if (terms.count != 0) stage_line(task, token, line, sum.packed());
          continue;
        }
      }
      sum.store(params.combined_x + std::int64_t{token} * 2 * params.hidden, wire, line);
    }
    if constexpr (kRdma) {
      if (task.relays && terms.count != 0) reach.hand_over(task.owner, token, member);
    }
    return true;
  }

  /// Waits for four lines of up to kTogether terms from the `first` on; `line` is this lane's. False: the call is over.
  DEEP_EP_DEVICE bool await(int token, CombineTerms& terms, int first, std::uint32_t line, bool measures,
                            Lines& lines) const {
    const bool is_line = line < wire.lines();
    const std::uint32_t at = LineLane().byte_at(line);
    const int count = terms.count - first < kTogether ? terms.count - first : kTogether;
    const std::int64_t cycles = clock_cycles();
    lines.missing = ((1u << count) - 1) & ~(terms.gone >> first);
    const auto tag = [&](int i) {
      if constexpr (kUnreduced) {
        return reach.tag(static_cast<std::uint32_t>(warp::shuffle(terms.expert, first + i)));
      } else {
        return reach.epoch;
      }
    };
    const auto all_there = [&](const Poll& look) {
      const std::uint32_t before = lines.missing;
      const bool there = lines.poll(
          look.thorough, tag, [&](int i) { return warp::shuffle(terms.row, first + i) + at; },
          [&](int) { return is_line; });
      if (measures) measure(terms, first, before & ~lines.missing, cycles);
      return there;
    };
    const auto gives_up = [&](const Poll& look) {
#pragma unroll 1
      for (std::uint32_t left = lines.missing; left != 0; left &= left - 1) {
        const int term = first + lowest_bit(left);
        if (is_gone(token, terms, term, look.begin)) terms.gone |= 1u << term;
      }
      lines.missing &= ~(terms.gone >> first);
      return warp::any(aborted(params.common.wait));
    };
    return poll_until(all_there, gives_up);
  }

  /// By a whole warp, of a term that does not come: will it never? Its rank is masked, or the dispatch had no room for
  /// it.
  DEEP_EP_DEVICE bool is_gone(int token, const CombineTerms& terms, int term, std::uint64_t begin) const {
    const int rank = warp::shuffle(terms.rank, term);
    if constexpr (kUnreduced) {
      const int expert = warp::shuffle(terms.expert, term);
      return UnreducedSurvey{params, reach}.has_no_row(token, expert, rank, warp::shuffle(terms.row, term), begin);
    } else {
      const Awaited row{rank, Wanted::low_latency_combine_rows, reach.epoch};
      if (lane_index() == 0 && !masked(params.common, rank) && reach.policy().is_late(row, begin)) {
        reach.policy().blame(row, 0);
      }
      warp::sync();
      return warp::any(masked(params.common, rank));
    }
  }

  DEEP_EP_DEVICE bool measures(int unit) const { return params.wait_cost != nullptr && unit == 0; }

  /// Of the terms that have come: of each rank the first.
  DEEP_EP_DEVICE void measure(const CombineTerms& terms, int first, std::uint32_t came, std::int64_t begin) const {
    const int i = lane_index() - first;
    if (i < 0 || i >= kTogether || (came >> i & 1u) == 0 || !terms.first_of_rank) return;
    add_relaxed<Scope::gpu>(params.wait_cost + terms.rank, clock_cycles() - begin);
  }

  /// By rails: stores a line of the node's sum where a poster fetches it.
  DEEP_EP_DEVICE void stage_line(const CombineTask& task, int token, std::uint32_t line, const Vec16& packed) const {
    const LineLane lane;
    const LinePart part{{std::uint64_t{packed.word[1]} << 32 | packed.word[0],
                         lane.has_tag() ? reach.epoch : std::uint64_t{packed.word[3]} << 32 | packed.word[2]}};
    store_line(reach.staged_row(task.owner, token).in(params.common.local) + lane.byte_at(line), part,
               line < wire.lines());
  }
};

}  // namespace deep_ep::device::low_latency
