// The owner's side of combine: the rows that a token's sum is made of are added in fp32 and rounded once.
//
//   in one launch   a rank's row: the sum of its experts' rows, or the only one, which the owner multiplies
//   by rails        another node has one such row, which the owner's rail there adds up from those of its node
//   unreduced       a row for each selection, as its expert left it
//
// The order is the same for all of them, and so are the bits: the rows of a rank from zero on, in the order of
// selections; the ranks of a node from zero on, ascending; the nodes, ascending. What is a sum of several rows of a
// rank, or of a node where there are several, is rounded to what travels of it, wherever it is added up.
//
// A block takes a token (of few tokens, two blocks one), and its warps share the token's lines. Each warp finds the
// rows for itself, and polls its lines of all of them at once: they are in its registers when they have arrived.
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/primitives/line.hpp"

namespace deep_ep::device::low_latency {

/// The rows of a token's sum in the order in which they are added: piece i is a row, or the rest of the row of piece
/// i - 1. Lane i < count holds piece i. A mask has one bit per piece.
struct CombinePieces {
  int count = 0;
  std::uint32_t rests = 0;    ///< pieces that are the rest of a row
  std::uint32_t ends = 0;     ///< the last ones of a part: see CombineSum
  std::uint32_t several = 0;  ///< of parts that are the sum of several experts' rows
  bool alone = false;         ///< the token has one row
  std::uint32_t firsts = 0;   ///< the first ones of a rank

  std::uint32_t mark = 0;  ///< of its tags; above it the rank whose row it is
  float weight = 1.0f;     ///< of an expert's row
  std::uint32_t row = 0;   ///< where it lies in this rank's heap, in lines

  static constexpr int kRankShift = 20;
  DEEP_EP_DEVICE static int rank_of(std::uint32_t mark) { return static_cast<int>(mark >> kRankShift); }
};
static_assert(kMaxRanks <= 1 << (32 - CombinePieces::kRankShift));

/// By one thread, unreduced, of a row in line `row` of the heap that does not come with the tag of this `mark`: if
/// another expert's row lies there, the call ends; but only once all ranks have sent and agree, as one that means
/// another call, with rows of another size, may have written there, too.
DEEP_EP_DEVICE void compare_row(const CombineCall<false>& call, int token, std::uint32_t mark, std::uint32_t row,
                                int rank) {
  const LowLatencyCombineParams& params = call.params;
  for (int peer = 0; peer < params.common.num_ranks; ++peer) {
    if (!call.load_announced(peer).known) return;
  }
  fence<Scope::system>();  // acquires what they have sent
  const std::byte* const line = params.common.local + std::size_t{row} * kTaggedLine;
  const std::uint64_t seen = load_acquire<Scope::system>(reinterpret_cast<const std::uint64_t*>(line + kTaggedPayload));
  if (seen == call.tag(mark)) return;
  call.refuse(rank, 2, call.expert_of(mark), static_cast<std::uint32_t>(token));
}

template <bool kRdma, bool kUnreduced>
struct CombineAdder {
  static constexpr int kTogether = 8;                  ///< pieces that are polled at once, four lines of each
  static constexpr bool kParts = kRdma || kUnreduced;  ///< parts are nodes, or ranks
  using Lines = LinePoller<kTogether>;

  const LowLatencyCombineParams& params;
  CombineCall<kRdma> call;
  int member, members;  ///< this warp, of those that share a token
  Selection loaded{};   ///< unreduced: the lane's of one token, loaded before the call was known
  int loaded_token = -1;

  DEEP_EP_DEVICE const CombineRowFormat& format() const { return params.format; }

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
          const CombinePieces pieces = find_pieces(owner, token);  // again where a rank has been masked: without it
          added = await_rows(token, pieces) && add_lines(owner, token, pieces);
          if (!added && warp::any(aborted(params.common.wait))) return;
        }
      }
    }
  }

 private:
  DEEP_EP_DEVICE bool relays(int owner) const { return kRdma && owner != params.common.rank; }
  DEEP_EP_DEVICE int node_of(int rank) const { return rank / params.common.node_width; }

  /// Waits for the rows whose tags cannot be trusted. False: one does not come.
  DEEP_EP_DEVICE bool await_rows(int token, const CombinePieces& pieces) const {
    if (!kRdma) return true;
    const int rank = pieces.rank_of(pieces.mark);
    const bool far = lane_index() < pieces.count && call.is_far(rank);
    const std::int64_t begin = clock_cycles();
    const bool there = !far || call.await_progress(rank, token + 1, Wanted::low_latency_combine_rows);
    if (far && (pieces.firsts >> lane_index() & 1) != 0 && measures(member)) {
      add_relaxed<Scope::gpu>(params.wait_cost + rank, clock_cycles() - begin);
    }
    return warp::agree(there);
  }

  DEEP_EP_DEVICE CombinePieces find_pieces(int owner, int token) const {
    // 1. The lane's selection, and the rank that has a row for it; -1: none has.
    const int lane = lane_index();
    Selection selection;
    int expert = -1, rank = -1;
    if (lane < params.num_topk && relays(owner)) {
      selection = call.load_announced(owner, token * params.num_topk + lane);
      expert = selection.known ? selection.expert(params) : -1;
      rank = params.rank_of(expert);
      if (rank >= 0 && !call.in_own_node(rank)) rank = -1;
    } else if (lane < params.num_topk) {
      selection = kUnreduced && token == loaded_token ? loaded : Selection::load(params, token, lane);
      expert = selection.expert(params);
      rank = params.rank_of(expert);
      // By rails its part is in the row of this rank's rail there.
      if (call.uses_rails() && rank >= 0 && !call.in_own_node(rank)) {
        rank = call.rail(call.node(rank), params.common.rank);
      }
    }
    // 2. The selections of the same rank, and of the same part of the sum. A rank that sums sends one row, for which
    // its first selection stands.
    const bool valid = rank >= 0 && !masked(params.common, rank);
    const int part = !valid ? -1 : kUnreduced ? rank : kRdma && params.common.node_width != 0 ? node_of(rank) : 0;
    const std::uint32_t of_rank = warp::match_any(valid ? static_cast<std::uint32_t>(rank) : ~0u);
    const std::uint32_t of_part = kRdma ? warp::match_any(static_cast<std::uint32_t>(part)) : of_rank;
    const bool first = lowest_bit(of_rank) == lane;
    const bool sums = !kUnreduced && (of_rank & (of_rank - 1)) != 0;
    const bool has_rest = sums && params.format.rest_bits != 0;
    const bool several = (of_part & (of_part - 1)) != 0;
    const std::uint32_t wanted = warp::ballot(valid && (first || kUnreduced));

    // 3. The place of its first piece: in the order of ranks, of a rank in the order of selections.
    const std::uint32_t with_rest = warp::ballot(has_rest) & wanted;
    const auto rest_of = [&](int selection) { return static_cast<int>(with_rest >> selection & 1); };
    int place = 0;
    each_bit(wanted, [&](int other) {
      const int its = warp::shuffle(rank, other);
      const bool before = its < rank || (kUnreduced && its == rank && other < lane);
      place += before ? 1 + rest_of(other) : 0;
    });

    // 4. The lane's piece.
    const int count = count_bits(wanted) + count_bits(with_rest);
    CombinePieces pieces{.count = count};
    int its_selection = 0;
    bool is_rest = false;
    each_bit(wanted, [&](int other) {
      const int behind = lane - warp::shuffle(place, other);
      if (behind < 0 || behind > rest_of(other)) return;
      its_selection = other;
      is_rest = behind != 0;
    });
    const std::uint32_t mark =
        sums ? call.sum_mark() : call.mark(kUnreduced ? CombineRowKind::selected_row : CombineRowKind::row, expert);
    const int its_rank = warp::shuffle(rank, its_selection);
    pieces.mark =
        static_cast<std::uint32_t>(its_rank) << CombinePieces::kRankShift | warp::shuffle(mark, its_selection);
    pieces.weight = warp::shuffle(sums ? 1.0f : selection.weight, its_selection);
    pieces.rests = warp::ballot(lane < count && is_rest);
    pieces.firsts = kUnreduced ? warp::ballot(warp::shuffle(first, its_selection)) : ~pieces.rests;
    if constexpr (kParts) {
      const int its_part = warp::shuffle(part, its_selection);
      const int next = warp::shuffle(its_part, lane + 1);
      pieces.ends = relays(owner) ? 0 : warp::ballot(lane < count && (lane + 1 == count || next != its_part));
      // A sum that is not of several nodes' ranks does not travel.
      const bool travels = kUnreduced || params.common.node_width != 0;
      pieces.several = warp::ballot(travels && warp::shuffle(several, its_selection));
      pieces.alone = count == 1 && (pieces.several & 1) == 0;
    }
    if (lane >= count) return pieces;
    const int slot = kUnreduced ? token * params.num_topk + its_selection : token;
    pieces.row = call.part_line(kUnreduced ? 0 : its_rank) + static_cast<std::uint32_t>(slot) * params.row_lines;
    if (relays(owner)) {
      pieces.row = static_cast<std::uint32_t>(call.row_of_member(owner, its_rank, token).offset / kTaggedLine);
    }
    return pieces;
  }

  /// Adds up this warp's lines of the token. False: a row does not come.
  DEEP_EP_DEVICE bool add_lines(int owner, int token, const CombinePieces& pieces) const {
    const LineLane lane;
#pragma unroll 1
    for (int unit = member; unit < format().line_groups; unit += members) {
      const auto line = static_cast<std::uint32_t>(unit * kWarpLines + lane.line);
      CombineSum sum;  // the last lane of a line also adds the tag, to channels that are not used
#pragma unroll 1
      for (int first = 0, now = 0; first < pieces.count; first += now) {
        now = pieces.count - first < kTogether ? pieces.count - first : kTogether;
        if (first + now < pieces.count && (pieces.rests >> (first + now) & 1) != 0) --now;  // a row and its rest
        Lines lines;
        if (!await(token, pieces, first, now, line, measures(unit), lines)) return false;
        // As in dispatch: few rows, so the block has no other token, and no other row to push. Some of each row is
        // here. In the last block a warp may still wait until all ranks have begun.
        const bool few = params.warps_per_row == block_warps() && params.common.mask == nullptr;
        const bool all = first + now >= pieces.count && block_index() + 1 != grid_blocks();
        if (!kRdma && few && all && params.common.lets_next_start) block::let_next_kernel_start();
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (i >= now) continue;
          const int piece = first + i;
          const auto vector = __builtin_bit_cast(Vec16, lines.part[i]);
          if ((pieces.rests >> piece & 1) == 0) {
            const float weight = warp::shuffle(pieces.weight, piece);
            Vec16 lower{};
            if (!kUnreduced && i + 1 < kTogether && (pieces.rests >> piece >> 1 & 1) != 0) {
              lower = lower_halves_of(__builtin_bit_cast(Vec16, lines.part[(i + 1) % kTogether]),
                                      params.format.rest_bits, CombineRowFormat::rest_half(line));
            }
            if constexpr (kUnreduced) fuse_row(sum.part, vector, weight);
            if constexpr (!kUnreduced) sum.add_row(vector, lower, pieces.alone && relays(owner) ? 1.0f : weight);
          }
          if (kParts && (pieces.ends >> piece & 1) != 0)
            sum.end_part((pieces.several >> piece & 1) != 0, params.format.rest_bits);
        }
      }
      if (relays(owner)) {
        if (pieces.count != 0) stage(owner, token, pieces, line, sum.part);
        continue;
      }
      const auto rounded = __builtin_bit_cast(Cell, pack_sum(kParts ? sum.total : sum.part));
      auto* const to = reinterpret_cast<Vec16*>(params.combined_x) +
                       std::size_t{static_cast<std::uint32_t>(token)} * static_cast<std::uint32_t>(format().vectors);
      const int vector = format().vector(line);
      if (vector >= 0) store_vector(to + vector, line, rounded);
    }
    if (relays(owner) && pieces.count != 0) call.hand_over(owner, token, member);
    return true;
  }

  /// By a whole warp: puts a line of a node's sum to where a poster fetches it.
  DEEP_EP_DEVICE void stage(int owner, int token, const CombinePieces& pieces, std::uint32_t line,
                            float (&sum)[8]) const {
    const LineLane lane;
    std::byte* const to = call.staged_row(owner, token).in(params.common.local);
    const bool is_line = line < format().lines;
    const std::uint64_t tag = call.tag(pieces.alone ? warp::shuffle(pieces.mark, 0) : call.sum_mark());
    const auto part_of = [&](const Vec16& vector) {
      auto part = __builtin_bit_cast(Cell, vector);
      if (lane.has_tag()) part.epoch = tag;
      return part;
    };
    if (!pieces.alone) add_half(sum, params.format.rest_bits);
    store_line(to + lane.byte_at(line), part_of(upper_halves(sum)), is_line);
    if (pieces.alone || params.format.rest_bits == 0) return;
    std::byte* const rest = to + lane.byte_at(format().rest_line(line));
    const Vec16 lower = lower_halves(sum);
    if (params.format.rest_bits == 16) return store_line(rest, part_of(lower), is_line);
    // Another warp may have the other half of the line. The first one's has the tag, too.
    const int half = CombineRowFormat::rest_half(line);
    auto* const words = reinterpret_cast<std::uint32_t*>(rest);
    if (!is_line) return;
    words[half] = upper_bytes(lower, 0);
    if (!lane.has_tag()) words[2 + half] = upper_bytes(lower, 2);
    if (lane.has_tag() && half == 0) *reinterpret_cast<std::uint64_t*>(rest + 8) = tag;
  }

  /// Waits for four lines of `count` pieces from the `first` on; `line` is this lane's. False: they do not come.
  DEEP_EP_DEVICE bool await(int token, const CombinePieces& pieces, int first, int count, std::uint32_t line,
                            bool measures, Lines& lines) const {
    const bool is_line = line < format().lines;
    const std::uint32_t part = line * kLineLanes + static_cast<std::uint32_t>(LineLane().part);
    const std::uint32_t to_rest = (format().rest_line(line) - line) * kLineLanes;
    lines.missing = (1u << count) - 1;
    // The sum of what is added now and when the lane's piece has come is the time. In between the word says nothing.
    const auto add_cycles = [&](std::uint32_t which, std::int64_t cycles) {
      const int i = lane_index() - first;
      const bool mine = i >= 0 && i < kTogether && (which >> i & 1u) != 0;
      if (!measures || !mine || (pieces.firsts >> lane_index() & 1) == 0) return;
      add_relaxed<Scope::gpu>(params.wait_cost + pieces.rank_of(pieces.mark), cycles);
    };
    add_cycles(lines.missing, -clock_cycles());
    const auto tag = [&](int i) { return call.tag(warp::shuffle(pieces.mark, first + i)); };
    const auto all_there = [&](const Poll& look) {
      const std::uint32_t before = lines.missing;
      const bool there = lines.poll(
          look.thorough, tag,
          [&](int i) {
            const std::uint32_t at = warp::shuffle(pieces.row, first + i) * kLineLanes + part +
                                     ((pieces.rests >> (first + i) & 1) != 0 ? to_rest : 0);
            return params.common.local + std::size_t{at} * sizeof(Vec16);
          },
          [&](int) { return is_line; });
      add_cycles(before & ~lines.missing, clock_cycles());
      return there;
    };
    const auto gives_up = [&](Poll& look) {  // each lane asks about its own piece
      const int i = lane_index() - first;
      const bool waits = i >= 0 && i < kTogether && (lines.missing >> i & 1u) != 0;
      return warp::any((waits && is_gone(token, pieces, look)) || aborted(params.common.wait));
    };
    const bool there = poll_until(all_there, gives_up);
    if (!there) add_cycles(lines.missing, clock_cycles());
    return there;
  }

  /// By one thread, of its piece, which does not arrive. Returns true if its rank is masked.
  DEEP_EP_DEVICE bool is_gone(int token, const CombinePieces& pieces, Poll& look) const {
    const int rank = pieces.rank_of(pieces.mark);
    if (masked(params.common, rank)) return true;
    if constexpr (kUnreduced) compare_row(call, token, pieces.mark, pieces.row, rank);
    if (!kUnreduced) call.ends({rank, Wanted::low_latency_combine_rows, call.epoch}, look);
    return !kUnreduced && masked(params.common, rank);
  }
  DEEP_EP_DEVICE bool measures(int unit) const { return params.wait_cost != nullptr && unit == 0; }
};

}  // namespace deep_ep::device::low_latency
