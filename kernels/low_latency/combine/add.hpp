// The owner's side of combine: the rows that a token's sum is made of, its terms, are added in fp32 and rounded once.
//
//   in one launch   a term is a rank's row, which is a sum already; in the order of the ranks
//   by rails        another node has one such row, which the owner's rail there adds up from those of its node
//   with hooks      a term is a selection's row as its expert left it, times its weight; in the order of the selections
//
// A block takes a token (with hooks and few tokens, two blocks), and its warps share the token's lines. Each warp finds
// the terms for itself, and polls its lines of all of them at once: they are in its registers when they have arrived.
#pragma once

#include <type_traits>

#include "kernels/common/tickets.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/primitives/line.hpp"

namespace deep_ep::device::low_latency {

/// A combine where rows travel as the experts left them: see unreduced.cu.
struct UnreducedCall : CombineCall<false> {
  using CombineCall<false>::CombineCall;

  /// What is written into the lines of a row of `expert`. Never what a call in one launch would write, so that no rank
  /// takes a row for a sum.
  DEEP_EP_DEVICE std::uint64_t tag(std::uint32_t expert) const {
    return std::uint64_t{expert} << 47 | std::uint64_t{1} << 46 | epoch;
  }
  /// Row of the dispatch's selection `k` of `token`, in the heap of the token's owner.
  DEEP_EP_DEVICE std::byte* selected_row(std::byte* heap, int num_topk, int token, int k) const {
    return row(heap, 0, token * num_topk + k);
  }

  /// By the last to arrive at a ticket, which has acquired what all others sent: tells `peer` that this rank has sent
  /// all its rows of the call, releasing them, and what it means by the call.
  DEEP_EP_DEVICE void tell_sent(int peer, std::uint32_t meaning) const {
    store_release<Scope::system>(sent_word(common.rank).in(common.heaps[peer]), epoch << 32 | meaning);
  }
  /// By one thread: has `peer` sent all its rows? Acquires them, and says which call it meant.
  DEEP_EP_DEVICE bool has_sent(int peer, std::uint32_t& meaning) const {
    const std::uint64_t word = load_acquire<Scope::system>(sent_word(peer).in(common.local));
    meaning = static_cast<std::uint32_t>(word);
    return word >> 32 == (epoch & 0xffffffffu);
  }
  /// Has `peer` announced selections? Then it takes this call for one in one launch.
  DEEP_EP_DEVICE bool has_announced_cells(int peer) const {
    return Selection::epoch_in(load_cell(selections(peer))) == epoch;
  }

 private:
  /// A word of each source for even and for odd epochs, which only far ranks use otherwise.
  DEEP_EP_DEVICE Place<std::uint64_t> sent_word(int source) const {
    return common.window.progress(LowLatencyKind::combine, epoch, source, 0);
  }
};

/// What ranks have said of the call.
struct UnreducedSurvey {
  const LowLatencyCombineParams& params;
  const UnreducedCall& call;

  /// By one warp of the rank: waits until every rank has sent all its rows, and all mean the same call.
  DEEP_EP_DEVICE void await_all_sent() const {
    const std::uint32_t ours = meaning_of(params);
    warp::each(params.common.num_ranks, [&](int peer) {
      wait_until(call.policy(), {peer, Wanted::low_latency_combine_rows, call.epoch}, [&](const Poll&) {
        std::uint32_t theirs = 0;
        const bool sent = call.has_sent(peer, theirs);
        if (sent ? theirs == ours : !call.has_announced_cells(peer)) return sent;
        refuse_call(params.common, peer, 0, ours, theirs);
        return true;
      });
    });
  }

  /// By one thread, of the row of `expert` of `rank`, which does not come: if another expert's row lies there, the call
  /// ends; but only once all ranks have sent and agree, as one that means another call, with rows of another size, may
  /// have written there, too.
  DEEP_EP_DEVICE void compare_row(int token, int expert, int rank, const std::byte* row) const {
    const std::uint32_t ours = meaning_of(params);
    const int num_ranks = params.common.num_ranks;
    for (int i = 0; i < num_ranks; ++i) {  // the row's own rank first: mostly it is the one that is late
      std::uint32_t theirs = 0;
      if (!call.has_sent((rank + i) % num_ranks, theirs) || theirs != ours) return;
    }
    const std::uint64_t seen =
        load_acquire<Scope::system>(reinterpret_cast<const std::uint64_t*>(row + kTaggedPayload));
    if (seen == call.tag(static_cast<std::uint32_t>(expert))) return;
    refuse_call(params.common, rank, 2, static_cast<std::uint32_t>(expert), static_cast<std::uint32_t>(token));
  }
};

/// The terms of a token's sum: lane i < count holds the i-th.
struct CombineTerms {
  int count = 0;
  int rank = -1;        ///< whose row it is
  int expert = 0;       ///< unreduced
  float weight = 1.0f;  ///< unreduced
  bool first_of_rank = true;
  const std::byte* row = nullptr;
};

/// Whose tokens a rank adds up: its own, or, by rails, those of a rank of another node. Then it adds up the rows of its
/// own node, and that rank gets the sum.
struct CombineTask {
  int owner;
  int num_tokens;  ///< at most
  bool relays;
};

template <bool kRdma, bool kUnreduced = false>
struct CombineAdder {
  using Call = std::conditional_t<kUnreduced, UnreducedCall, CombineCall<kRdma>>;
  static constexpr int kTogether = 8;  ///< rows that are polled at once, four lines of each
  using Lines = LinePoller<kTogether>;

  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  Call call;
  std::uint32_t meaning;  ///< see meaning_of(); without hooks
  int member, members;    ///< this warp, of those that share a token
  Selection loaded{};     ///< unreduced: the lane's of one token, loaded before the call was known
  int loaded_token = -1;

  /// Adds up every `step`-th token from `first` on. By rails first the tokens of other nodes' ranks, whose sums have
  /// further to go.
  DEEP_EP_DEVICE void add_all(int first, int step) const {
#pragma unroll 1
    for (int turn = 1; turn <= call.num_nodes(); ++turn) {
      CombineTask task{params.common.rank, params.num_tokens, false};
      if constexpr (kRdma) {
        if (turn != call.num_nodes()) {
          const int owner = call.rail((call.own_node() + turn) % call.num_nodes());
          if (!call.await_announced(owner)) return;
          task = {owner, params.max_tokens, true};
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
#pragma unroll 1
      for (bool added = false; !added;) {
        const CombineTerms terms = find_terms(task, token);  // again where a rank has been masked: without it
        added = await_rows(token, terms) && add_lines(task, token, terms);
        if (!added && warp::any(aborted(params.common.wait))) return false;
      }
    }
    return true;
  }

  /// Waits for the rows whose tags cannot be trusted. False: one does not come.
  DEEP_EP_DEVICE bool await_rows(int token, const CombineTerms& terms) const {
    if (!kRdma) return true;
    bool there = true;
    if (terms.rank >= 0) {
      const std::int64_t begin = clock_cycles();
      const bool far = call.is_far(terms.rank);
      there = !far || call.await_progress(terms.rank, token + 1, Wanted::low_latency_combine_rows);
      if (measures(member) && far) add_relaxed<Scope::gpu>(params.wait_cost + terms.rank, clock_cycles() - begin);
    }
    return warp::agree(there);
  }

  /// In each lane the rank whose row the lane's selection of the token is a part of; -1: of none.
  DEEP_EP_DEVICE int rank_of_selection(const CombineTask& task, int token) const {
    const int lane = lane_index();
    if (lane >= params.num_topk) return -1;
    if constexpr (kRdma) {
      if (task.relays) {
        const int rank = announced_rank(params, call, meaning, task.owner, token, lane);
        return rank >= 0 && call.in_own_node(rank) ? rank : -1;
      }
    }
    const std::int64_t index = params.topk_idx.load(std::int64_t{token} * params.num_topk + lane);
    return call.sender(params.rank_of(expert_of(index, params.num_experts())));
  }

  DEEP_EP_DEVICE CombineTerms find_terms(const CombineTask& task, int token) const {
    const int lane = lane_index();
    float weight = 1.0f;
    int expert = -1, rank = -1;
    if constexpr (kUnreduced) {
      if (lane < params.num_topk) {
        const Selection now = token == loaded_token ? loaded : Selection::load(params, token, lane);
        weight = now.weight;
        expert = now.expert(params);
        rank = params.rank_of(expert);
      }
    } else {
      rank = rank_of_selection(task, token);
    }

    // If a rank has one row, its first selection stands for that row. Terms are in the order of ranks then.
    const bool first = lowest_bit(warp::match_any(static_cast<std::uint32_t>(rank))) == lane;
    const std::uint32_t wanted = warp::ballot(rank >= 0 && (first || kUnreduced) && !masked(params.common, rank));
    int place = kUnreduced ? count_bits(wanted & ((1u << lane) - 1)) : 0;
    if constexpr (!kUnreduced) {
      each_bit(wanted, [&](int other) { place += warp::shuffle(rank, other) < rank ? 1 : 0; });
    }
    CombineTerms terms{.count = count_bits(wanted)};
    int selection = 0;  // that the lane's term is
    each_bit(wanted, [&](int other) {
      if (warp::shuffle(place, other) == lane) selection = other;
    });
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
      terms.row = call.selected_row(params.common.local, params.num_topk, token, selection);
    } else {
      terms.row = call.row(params.common.local, its_rank, token);
    }
    if constexpr (kRdma) {
      if (task.relays) terms.row = call.row_of_member(params.common.local, task.owner, its_rank, token);
    }
    return terms;
  }

  /// Adds up this warp's lines of the token. False: a row does not come.
  DEEP_EP_DEVICE bool add_lines(const CombineTask& task, int token, const CombineTerms& terms) const {
    const LineLane lane;
#pragma unroll 1
    for (int unit = member; unit < wire.pieces(); unit += members) {
      const auto line = static_cast<std::uint32_t>(unit * kWarpLines + lane.line);
      float sum[8] = {};  // the last lane of a line also adds the tag, to sums that are not used
#pragma unroll 1
      for (int first = 0; first < terms.count; first += kTogether) {
        Lines lines;
        if (!await(token, terms, first, line, measures(unit), lines)) return false;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first + i >= terms.count) continue;
          if constexpr (kUnreduced) {
            add_weighted(sum, lines.part[i].vector(), warp::shuffle(terms.weight, first + i));
          } else {
            add_bf16(sum, lines.part[i].vector());
          }
        }
      }
      const Vec16 rounded = pack_sum(sum);
      if constexpr (kRdma) {
        if (task.relays) {  // to where a poster fetches it
          LinePart part = LinePart::of(rounded);
          if (lane.has_tag()) part.word[1] = call.epoch;
          if (terms.count != 0) {
            store_line(call.staged_row(task.owner, token).in(params.common.local) + lane.byte_at(line), part,
                       line < wire.lines());
          }
          continue;
        }
      }
      auto* const to = reinterpret_cast<Vec16*>(params.combined_x) + std::int64_t{token} * wire.vectors();
      const int vector = wire.vector(line);
      if (vector >= 0) store_vector(to + vector, line, LinePart::of(rounded));
    }
    if constexpr (kRdma) {
      if (task.relays && terms.count != 0) call.hand_over(task.owner, token, member);
    }
    return true;
  }

  /// Waits for four lines of up to kTogether terms from the `first` on; `line` is this lane's. False: they do not come.
  DEEP_EP_DEVICE bool await(int token, const CombineTerms& terms, int first, std::uint32_t line, bool measures,
                            Lines& lines) const {
    const bool is_line = line < wire.lines();
    const std::uint32_t at = LineLane().byte_at(line);
    const int count = terms.count - first < kTogether ? terms.count - first : kTogether;
    const std::int64_t cycles = clock_cycles();
    lines.missing = (1u << count) - 1;
    const auto tag = [&](int i) {
      if constexpr (kUnreduced) {
        return call.tag(static_cast<std::uint32_t>(warp::shuffle(terms.expert, first + i)));
      } else {
        return call.epoch;
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
      bool gone = false;
      each_bit(lines.missing, [&](int i) { gone = is_gone(token, terms, first + i, look.begin) || gone; });
      return gone || warp::any(aborted(params.common.wait));
    };
    return poll_until(all_there, gives_up);
  }

  /// By a whole warp, of a term that does not come: is its rank masked?
  DEEP_EP_DEVICE bool is_gone(int token, const CombineTerms& terms, int term, std::uint64_t begin) const {
    const int rank = warp::shuffle(terms.rank, term);
    if constexpr (kUnreduced) {
      const int expert = warp::shuffle(terms.expert, term);
      const std::byte* row = warp::shuffle(terms.row, term);
      if (lane_index() == 0) UnreducedSurvey{params, call}.compare_row(token, expert, rank, row);
      warp::sync();
      return false;
    } else {
      if (lane_index() == 0 && !masked(params.common, rank)) {
        call.policy().ends({rank, Wanted::low_latency_combine_rows, call.epoch}, begin);
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
};

}  // namespace deep_ep::device::low_latency
