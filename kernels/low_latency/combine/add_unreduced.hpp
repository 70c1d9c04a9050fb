// The owner's side of combine where rows come as the experts left them: each is multiplied by its weight and added in
// fp32, in the order of the token's selections, and the sum is rounded once. Rank-major the rows of the ranks are
// added, by rank.
//
// A block takes a token, and its warps share the token's lines, as in add.hpp; with few tokens, two blocks. Where a row
// lies follows from the selection. If the dispatch brought none there, or another expert's, the owner finds out once
// the expert's rank has sent all its rows.
#pragma once

#include "kernels/common/line_poller.hpp"
#include "kernels/low_latency/combine/announce.hpp"
#include "kernels/low_latency/combine/fp8.hpp"
#include "kernels/low_latency/combine/unreduced.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::low_latency {

/// What a token's sum is made of, in lane i < count the i-th term.
struct CombineTerms {
  int count = 0;
  int expert = 0;
  int rank = 0;  ///< the expert's
  bool first_of_rank = false;
  float weight = 0.0f;
  const std::byte* row = nullptr;
  std::uint32_t dropped = 0;  ///< in each lane bit i: the dispatch had no room for the i-th term
};

template <bool kFp8>
struct UnreducedAdder {
  using Sum = std::conditional_t<kFp8, Fp8LineSum, Bf16LineSum>;
  static constexpr int kTogether = 8;  ///< rows that are polled at once, four lines of each
  using Lines = LinePoller<kTogether>;

  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  int member;                   ///< of the warps that share a token, in one or two blocks
  int members;                  ///< how many they are
  int first_token, next_token;  ///< this block's: the first one, and how many further on each next one is
  LoadedSelection loaded{};     ///< the lane's of the first token

  DEEP_EP_DEVICE UnreducedAdder(const LowLatencyCombineParams& p, const CombineWire& w) : params(p), wire(w) {
    const int blocks = params.common.working_blocks;
    const int by_two = 2 * params.num_tokens <= blocks ? 1 : 0;
    member = (block_index() & by_two) * block_warps() + warp_index();
    members = block_warps() << by_two;
    first_token = block_index() < blocks ? block_index() >> by_two : params.num_tokens;  // a further block has none
    next_token = blocks >> by_two;
  }

  /// Starts the loads that do not depend on the call.
  DEEP_EP_DEVICE void load_first() {
    if (first_token < params.num_tokens) load(first_token);
  }

  /// Adds up the block's tokens. False: the call is over.
  DEEP_EP_DEVICE bool add_all(const UnreducedReach& reach) {
#pragma unroll 1
    for (int token = first_token; token < params.num_tokens; token += next_token) {
      if (token != first_token) load(token);
      CombineTerms terms = find_terms(reach, token);
      if (!add_lines(reach, token, terms)) return false;
    }
    return true;
  }

  /// By one warp of the rank: waits until everybody has sent all its rows, and all mean the same call.
  DEEP_EP_DEVICE void await_all_sent(const UnreducedReach& reach) const {
    const std::uint32_t ours = call_of(params);
#pragma unroll 1
    for (int peer = lane_index(); peer < params.common.num_ranks; peer += kWarpSize) {
      std::uint32_t theirs = 0;
      bool disagrees = false;
      const auto told = [&](const Poll&) {
        if (reach.has_sent(peer, theirs)) return true;
        disagrees = reach.has_announced_cells(peer);
        return disagrees;
      };
      if (!wait_until(reach.policy(), {peer, Wanted::low_latency_combine_rows, reach.epoch}, told)) continue;
      if (disagrees || theirs != ours) refuse_call(reach, peer, 0, ours, theirs);
    }
  }

 private:
  DEEP_EP_DEVICE void load(int token) {
    if (lane_index() < params.num_topk) loaded = Selections{params}.load(token, lane_index());
  }

  DEEP_EP_DEVICE CombineTerms find_terms(const UnreducedReach& reach, int token) const {
    const Selections selections{params};
    const int lane = lane_index();
    int expert = -1;
    float weight = 1.0f;
    if (lane < params.num_topk) {
      if (member == 0) selections.report_unknown(loaded, token);
      expert = selections.expert_of(loaded.index);
      if (!params.rank_major) weight = loaded.weight;
    }
    const int rank = selections.rank_of(expert);

    // Rank-major the first of the selections on a rank stands for it, and comes after those on lower ranks.
    const bool first = lowest_bit(warp::match_any(static_cast<std::uint32_t>(rank))) == lane;
    const bool counts = expert >= 0 && (first || !params.rank_major);
    const std::uint32_t wanted = warp::ballot(counts);
    int place = count_bits(wanted & ((1u << lane) - 1));
    if (params.rank_major) {
      place = 0;
#pragma unroll 1
      for (std::uint32_t left = wanted; left != 0; left &= left - 1) {
        place += warp::shuffle(rank, lowest_bit(left)) < rank ? 1 : 0;
      }
    }
    CombineTerms terms{.count = count_bits(wanted)};
    int selection = 0;  // that the lane's term is
#pragma unroll 1
    for (std::uint32_t left = wanted; left != 0; left &= left - 1) {
      if (warp::shuffle(place, lowest_bit(left)) == lane) selection = lowest_bit(left);
    }
    terms.expert = warp::shuffle(expert, selection);
    terms.rank = warp::shuffle(rank, selection);
    terms.weight = warp::shuffle(weight, selection);
    const bool is_term = lane < terms.count;
    terms.first_of_rank =
        lowest_bit(warp::match_any(is_term ? static_cast<std::uint32_t>(terms.rank) : ~0u)) == lane && is_term;
    if (is_term) {
      terms.row =
          params.rank_major ? reach.row_from(params.common.rank, terms.rank, token) : row_of(reach, token, selection);
    }
    return terms;
  }

  DEEP_EP_DEVICE const std::byte* row_of(const UnreducedReach& reach, int token, int k) const {
    return reach.row_in_turn(params.common.local, params.num_topk, token, k);
  }
  /// Of a row of `expert`.
  DEEP_EP_DEVICE std::uint64_t tag_of(const UnreducedReach& reach, int expert) const {
    return reach.tag(params.rank_major ? 0 : static_cast<std::uint32_t>(expert));
  }

  DEEP_EP_DEVICE bool add_lines(const UnreducedReach& reach, int token, CombineTerms& terms) const {
    const LineLane lane;
#pragma unroll 1
    for (int unit = member; unit < Sum::units(wire); unit += members) {
      const auto line = static_cast<std::uint32_t>(unit * kWarpLines + lane.line);
      const bool measures = params.wait_cost != nullptr && unit == 0;
      Sum sum;
#pragma unroll 1
      for (int first = 0; first < terms.count; first += kTogether) {
        Lines lines;
        if (!await(reach, token, terms, first, line, measures, lines)) return false;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first + i >= terms.count || (terms.dropped >> (first + i) & 1u) != 0) continue;
          sum.add_weighted(lines.part[i], line, warp::shuffle(terms.weight, first + i));
        }
      }
      sum.store(params.combined_x + std::int64_t{token} * 2 * params.hidden, wire, line);
    }
    return true;
  }

  /// Waits for four lines of up to kTogether terms from the `first` on; `line` is this lane's. False: the call is over.
  DEEP_EP_DEVICE bool await(const UnreducedReach& reach, int token, CombineTerms& terms, int first, std::uint32_t line,
                            bool measures, Lines& lines) const {
    const std::uint32_t at = LineLane().byte_at(line);
    const int count = terms.count - first < kTogether ? terms.count - first : kTogether;
    const std::int64_t cycles = clock_cycles();
    lines.missing = ((1u << count) - 1) & ~(terms.dropped >> first);
    const auto all_there = [&](const Poll& look) {
      const std::uint32_t before = lines.missing;
      const bool there = lines.poll(
          Lines::kAll, look.thorough, [&](int i) { return tag_of(reach, warp::shuffle(terms.expert, first + i)); },
          [&](int i) { return warp::shuffle(terms.row, first + i) + at; }, [&](int) { return line < wire.lines(); });
      if (measures) measure(terms, first, before & ~lines.missing, cycles);
      return there;
    };
    const auto gives_up = [&](const Poll& look) {
#pragma unroll 1
      for (std::uint32_t left = lines.missing; left != 0; left &= left - 1) {
        look_for(reach, token, terms, first + lowest_bit(left), look.begin);
      }
      lines.missing &= ~(terms.dropped >> first);
      return warp::any(aborted(params.common.wait));
    };
    return poll_until(all_there, gives_up);
  }

  /// What the ranks have said of the call.
  struct Survey {
    int disagrees = -1;        ///< the first rank that means another one
    int unsent = -1;           ///< the first that has not sent everything
    std::uint32_t theirs = 0;  ///< what `disagrees` means
  };
  /// By a whole warp.
  DEEP_EP_DEVICE Survey ask_all(const UnreducedReach& reach, std::uint32_t ours) const {
    Survey survey;
#pragma unroll 1
    for (int first = 0; first < params.common.num_ranks; first += kWarpSize) {
      const int peer = first + lane_index();
      bool sent = true;
      bool disagrees = false;
      std::uint32_t theirs = 0;
      if (peer < params.common.num_ranks) {
        sent = reach.has_sent(peer, theirs);
        disagrees = sent ? theirs != ours : reach.has_announced_cells(peer);
      }
      const std::uint32_t odd = warp::ballot(disagrees);
      const std::uint32_t missing = warp::ballot(!sent);
      theirs = warp::shuffle(theirs, odd == 0 ? 0 : lowest_bit(odd));
      if (survey.disagrees < 0 && odd != 0) survey = {first + lowest_bit(odd), survey.unsent, theirs};
      if (survey.unsent < 0 && missing != 0) survey.unsent = first + lowest_bit(missing);
    }
    return survey;
  }

  /// What has become of a term that does not come? Once its rank has sent everything, either it is here, or the
  /// dispatch had no room for it, or another expert's lies there. Or a rank that means another call, with rows of
  /// another size, has written where it lay; so nobody is blamed for a row that is not there before all have said which
  /// call they mean.
  DEEP_EP_DEVICE void look_for(const UnreducedReach& reach, int token, CombineTerms& terms, int term,
                               std::uint64_t begin) const {
    const int rank = warp::shuffle(terms.rank, term);
    const int expert = warp::shuffle(terms.expert, term);
    const std::uint32_t ours = call_of(params);
    Survey survey{.unsent = rank};
    bool sent = false;
    if (lane_index() == 0) {
      sent = reach.has_sent(rank, survey.theirs);
      if (sent ? survey.theirs != ours : reach.has_announced_cells(rank)) survey.disagrees = rank;
    }
    sent = warp::any(sent && survey.disagrees < 0);
    warp::sync();  // what other lanes read comes after the rank's word
    bool found_here = false;
    if (sent) {
      std::uint64_t seen = 0;
      const std::byte* row = warp::shuffle(terms.row, term);
      if (lane_index() == 0)
        seen = load_acquire<Scope::system>(reinterpret_cast<const std::uint64_t*>(row + kTaggedPayload));
      found_here = warp::any(seen == tag_of(reach, expert));
      if (warp::any(seen == reach.tag(UnreducedReach::kNoRow | static_cast<std::uint32_t>(rank)))) {
        terms.dropped |= 1u << term;
        return;
      }
      survey = ask_all(reach, ours);
    }
    if (lane_index() == 0) {
      if (survey.disagrees >= 0) {
        refuse_call(reach, survey.disagrees, 0, ours, survey.theirs);
      } else if (survey.unsent < 0 && !found_here) {
        refuse_call(reach, rank, 2, static_cast<std::uint64_t>(expert), static_cast<std::uint64_t>(token));
      } else {
        const Awaited rows{survey.unsent < 0 ? rank : survey.unsent, Wanted::low_latency_combine_rows, reach.epoch};
        if (reach.policy().is_late(rows, begin)) reach.policy().blame(rows, 0);
      }
    }
    warp::sync();
  }

  /// Of the rows that have come: of each rank the first, as elsewhere a rank has one.
  DEEP_EP_DEVICE void measure(const CombineTerms& terms, int first, std::uint32_t came, std::int64_t begin) const {
    const int i = lane_index() - first;
    if (i < 0 || i >= kTogether || (came >> i & 1u) == 0 || !terms.first_of_rank) return;
    add_relaxed<Scope::gpu>(params.wait_cost + terms.rank, clock_cycles() - begin);
  }
};

/// By all threads of all blocks, when their warps have received: the last block tells the peers, who may send the call
/// after the next. All rows of this one are there, as one of the blocks has waited for that.
DEEP_EP_DEVICE void tell_all_received(const UnreducedReach& reach, const LowLatencyEpochs& epochs) {
  const LowLatencyParams& common = reach.common;
  if (!last_warp_to_finish(common, epochs, LowLatencyPhase::receive)) return;
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarpSize) reach.acknowledge_now(peer);
}

}  // namespace deep_ep::device::low_latency
