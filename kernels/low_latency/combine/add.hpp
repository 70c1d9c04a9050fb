// The owner's side of combine: the rows that a token's sum is made of, its terms, are added in fp32 and rounded once.
//
//   in one launch   a term is a rank's row, which is a sum already; in the order of the ranks
//   by rails        another node has one such row, which the owner's rail there adds up from those of its node
//   unreduced       a term is a selection's row as its expert left it, times its weight; in the order of the selections
//
// A block takes a token (of few tokens, two blocks one), and its warps share the token's lines. Each warp finds the
// terms for itself, and polls its lines of all of them at once: they are in its registers when they have arrived.
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/primitives/line.hpp"

namespace deep_ep::device::low_latency {

/// The terms of a token's sum: lane i < count holds the i-th.
struct CombineTerms {
  int count = 0;
  int rank = -1;        ///< whose row it is
  int expert = 0;       ///< unreduced
  float weight = 1.0f;  ///< unreduced
  bool first_of_rank = true;
  const std::byte* row = nullptr;
};

template <bool kRdma, bool kUnreduced = false>
struct CombineAdder {
  static constexpr int kTogether = 8;  ///< rows that are polled at once, four lines of each
  using Lines = LinePoller<kTogether>;

  const LowLatencyCombineParams& params;
  CombineCall<kRdma> call;
  int member, members;  ///< this warp, of those that share a token
  Selection loaded{};   ///< unreduced: the lane's of one token, loaded before the call was known
  int loaded_token = -1;
  CombineWire kept{params.hidden};

  /// Kernels with RDMA do not keep it: where they did, a receive part took 15.5 us instead of 14.1 on two H200.
  DEEP_EP_DEVICE CombineWire wire() const {
    if constexpr (kRdma) return {params.hidden};
    return kept;
  }

  /// Adds up every `step`-th token of this rank from `first` on. By rails before these the tokens of other nodes'
  /// ranks, whose sums have further to go: of their rows those of this node. Their owner gets the sum.
  DEEP_EP_DEVICE void add_all(int first, int step) const {
#pragma unroll 1
    for (int turn = 1; turn <= call.num_nodes(); ++turn) {
      int owner = params.common.rank;
      if (call.uses_rails()) owner = call.rail((call.own_node() + turn) % call.num_nodes(), owner);
      if (relays(owner) && !call.await_announced(owner)) return;
      const int tokens = relays(owner) ? params.max_tokens : params.num_tokens;
#pragma unroll 1
      for (int token = first; token < tokens; token += step) {
#pragma unroll 1
        for (bool added = false; !added;) {
          const CombineTerms terms = find_terms(owner, token);  // again where a rank has been masked: without it
          added = await_rows(token, terms) && add_lines(owner, token, terms);
          if (!added && warp::any(aborted(params.common.wait))) return;
        }
      }
    }
  }

 private:
  DEEP_EP_DEVICE bool relays(int owner) const { return kRdma && owner != params.common.rank; }

  /// Waits for the rows whose tags cannot be trusted. False: one does not come.
  DEEP_EP_DEVICE bool await_rows(int token, const CombineTerms& terms) const {
    if (!kRdma) return true;
    const bool far = terms.rank >= 0 && call.is_far(terms.rank);
    const std::int64_t begin = clock_cycles();
    const bool there = !far || call.await_progress(terms.rank, token + 1, Wanted::low_latency_combine_rows);
    if (far && measures(member)) add_relaxed<Scope::gpu>(params.wait_cost + terms.rank, clock_cycles() - begin);
    return warp::agree(there);
  }

  DEEP_EP_DEVICE CombineTerms find_terms(int owner, int token) const {
    // The lane's selection, and the rank whose row it is a part of; -1: of none.
    const int lane = lane_index();
    float weight = 1.0f;
    int expert = -1, rank = -1;
    if (lane < params.num_topk && relays(owner)) {
      rank = call.announced_member(owner, token, lane);
    } else if (lane < params.num_topk) {
      const Selection now = kUnreduced && token == loaded_token ? loaded : Selection::load(params, token, lane);
      if (kUnreduced) weight = now.weight;
      expert = now.expert(params);
      rank = params.rank_of(expert);
      // By rails its part is in the row of this rank's rail there.
      if (call.uses_rails() && rank >= 0 && !call.in_own_node(rank))
        rank = call.rail(call.node(rank), params.common.rank);
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
      terms.first_of_rank = warp::shuffle(first, selection);
    }
    if (lane >= terms.count) return terms;
    terms.rank = its_rank;
    const Place<std::byte> row = kUnreduced      ? call.selected_row(token, selection)
                                 : relays(owner) ? call.row_of_member(owner, its_rank, token)
                                                 : call.row(its_rank, token);
    terms.row = row.in(params.common.local);
    return terms;
  }

  /// Adds up this warp's lines of the token. False: a row does not come.
  DEEP_EP_DEVICE bool add_lines(int owner, int token, const CombineTerms& terms) const {
    const LineLane lane;
#pragma unroll 1
    for (int unit = member; unit < wire().pieces; unit += members) {
      const auto line = static_cast<std::uint32_t>(unit * kWarpLines + lane.line);
      float sum[8] = {};  // the last lane of a line also adds the tag, to sums that are not used
#pragma unroll 1
      for (int first = 0; first < terms.count; first += kTogether) {
        Lines lines;
        if (!await(token, terms, first, line, measures(unit), lines)) return false;
        // As in dispatch: few rows, so the block has no other token, and no other row to push. Some of each row is
        // here. In the last block a warp may still wait until all ranks have begun.
        const bool few = params.warps_per_row == block_warps() && params.common.mask == nullptr;
        const bool all = first + kTogether >= terms.count && block_index() + 1 != grid_blocks();
        if (!kRdma && few && all) block::let_next_kernel_start();
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first + i >= terms.count) continue;
          add_weighted(sum, __builtin_bit_cast(Vec16, lines.part[i]),
                       kUnreduced ? warp::shuffle(terms.weight, first + i) : 1.0f);
        }
      }
      auto rounded = __builtin_bit_cast(Cell, pack_sum(sum));
      if (relays(owner)) {  // to where a poster fetches it
        if (lane.has_tag()) rounded.epoch = call.epoch;
        if (terms.count != 0) {
          store_line(call.staged_row(owner, token).in(params.common.local) + lane.byte_at(line), rounded,
                     line < wire().lines);
        }
        continue;
      }
      auto* const to = reinterpret_cast<Vec16*>(params.combined_x) + std::int64_t{token} * wire().vectors;
      const int vector = wire().vector(line);
      if (vector >= 0) store_vector(to + vector, line, rounded);
    }
    if (relays(owner) && terms.count != 0) call.hand_over(owner, token, member);
    return true;
  }

  /// Waits for four lines of up to kTogether terms from the `first` on; `line` is this lane's. False: they do not come.
  DEEP_EP_DEVICE bool await(int token, const CombineTerms& terms, int first, std::uint32_t line, bool measures,
                            Lines& lines) const {
    const bool is_line = line < wire().lines;
    const std::uint32_t at = LineLane().byte_at(line);
    const int count = terms.count - first < kTogether ? terms.count - first : kTogether;
    const std::int64_t cycles = clock_cycles();
    lines.missing = (1u << count) - 1;
    const auto tag = [&](int i) { return kUnreduced ? call.tag(warp::shuffle(terms.expert, first + i)) : call.epoch; };
    const auto all_there = [&](const Poll& look) {
      const std::uint32_t before = lines.missing;
      const bool there = lines.poll(
          look.thorough, tag, [&](int i) { return warp::shuffle(terms.row, first + i) + at; },
          [&](int) { return is_line; });
      const int i = lane_index() - first;
      const bool came = i >= 0 && i < kTogether && ((before & ~lines.missing) >> i & 1u) != 0;
      if (measures && came && terms.first_of_rank) {
        add_relaxed<Scope::gpu>(params.wait_cost + terms.rank, clock_cycles() - cycles);
      }
      return there;
    };
    const auto gives_up = [&](Poll& look) {
      bool gone = false;
      each_bit(lines.missing, [&](int i) { gone = is_gone(token, terms, first + i, look) || gone; });
      return gone || warp::any(aborted(params.common.wait));
    };
    return poll_until(all_there, gives_up);
  }

  /// By a whole warp, of a term that does not come: is its rank masked?
  DEEP_EP_DEVICE bool is_gone(int token, const CombineTerms& terms, int term, Poll& look) const {
    const int rank = warp::shuffle(terms.rank, term);
    if constexpr (kUnreduced) {
      const int expert = warp::shuffle(terms.expert, term);
      const std::byte* row = warp::shuffle(terms.row, term);
      if (lane_index() == 0) compare_row(token, expert, rank, row);
    } else if (lane_index() == 0 && !masked(params.common, rank)) {
      call.ends({rank, Wanted::low_latency_combine_rows, call.epoch}, look);
    }
    warp::sync();
    return !kUnreduced && warp::any(masked(params.common, rank));
  }
  /// By one thread, unreduced, of the row of `expert` of `rank`, which does not come: if another expert's row lies
  /// there, the call ends; but only once all ranks have sent and agree, as one that means another call, with rows of
  /// another size, may have written there, too.
  DEEP_EP_DEVICE void compare_row(int token, int expert, int rank, const std::byte* row) const {
    for (int peer = 0; peer < params.common.num_ranks; ++peer) {
      if (!call.load_announced(peer).known) return;
    }
    fence<Scope::system>();  // acquires what they have sent
    const std::uint64_t seen =
        load_acquire<Scope::system>(reinterpret_cast<const std::uint64_t*>(row + kTaggedPayload));
    if (seen == call.tag(expert)) return;
    call.refuse(rank, 2, static_cast<std::uint32_t>(expert), static_cast<std::uint32_t>(token));
  }

  DEEP_EP_DEVICE bool measures(int unit) const { return params.wait_cost != nullptr && unit == 0; }
};

}  // namespace deep_ep::device::low_latency
