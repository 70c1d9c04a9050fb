// Low-latency combine: for each token of this rank, the weighted sum of what the experts made of it.
//
// Each rank sums the rows of its own experts and sends one row per token to the token's owner, which adds up the ranks'
// rows (add.hpp). Such a sum travels with more bits than bfloat16; a rank with one row sends that one. Send part:
// owners announce their tokens' selections, expert ranks sum and push. Receive part: owners add. If the weights came
// with the dispatch, expert ranks push without an announcement: an owner only says which call it means, and a late one
// holds up no sender.
//
// What waits for what, which decides how long a call with few tokens takes:
//   owner     counters, selections, acknowledgements (one load time) -> cells to the peers (one trip)
//   expert    row table (one load time) -> rows of x (one load time), meanwhile the cells come -> lines to the owner
//             (one trip)
//   owner     lines, as they are polled -> result
//   by rails  lines, as the owner's rail in this node polls and adds them -> its NIC -> owner (peers.hpp)
// There is no barrier of the grid, and ranks wait for each other only there; with masking one block also waits
// until all ranks have begun. unreduced.hpp says how it is where rows travel as the experts left them.
#include <type_traits>

#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/combine/add.hpp"
#include "kernels/low_latency/combine/unreduced.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// By the threads of a block, which share them: announces the selections of its tokens. A token has a cell for each
/// peer and selection. A thread's `first` one has been loaded before the epoch was known. A peer's cells are free once
/// it has said that it is done with the call before the last.
template <class Call>
DEEP_EP_DEVICE void announce(const LowLatencyCombineParams& params, const Call& call, const CombineShared& shared,
                             const Selection& first) {
  const LowLatencyParams& common = params.common;
#pragma unroll 1
  for (int token = block_index(); token < params.num_tokens; token += common.working_blocks) {
    block::each(common.num_ranks * params.num_topk, [&](int cell) {
      const bool is_first = token == block_index() && cell == thread_index();
      const int peer = cell / params.num_topk;
      const int k = cell % params.num_topk;
      if (masked(common, peer) || call.is_far(peer)) return;
      if (!call.await_room(peer, shared.acknowledged[peer])) return;
      const Selection selection = is_first ? first : Selection::load(params, token, k);
      const Place<Cell> to = common.window.selections.at(call.epoch, common.rank, token * params.num_topk + k);
      call.announce(selection, to.in(common.heaps[peer]));
    });
  }
}

/// The expert side: for each row that the dispatch brought, this rank weights and sums what its experts made of the
/// token, and sends it to the token's owner as one row.
///
/// Rows of an owner come in token order, so that it can begin to add. The warps of a group need nothing from each
/// other: each looks for the owner's selections, sums its channels and stores its lines.
template <class Call, bool kWeighted>
struct CombinePusher : RowPusher {
  static constexpr int kTogether = 8;  ///< loads of a thread that are under way at once
  static constexpr int kLines = 2;     ///< of each row, as their rests share a line

  DEEP_EP_DEVICE void push_all(const Call& call) const {
    // By rails rows go to other ranks than those that announce that they want them.
    const int width = params.common.rail_width;
    if (call.uses_rails() && !shared.await_room(call, call.own_node() * width, width)) return;
    each([&](const CombineRow& row, int) {
      // The same for all lanes, even while another warp masks the rank.
      return warp::any(masked(params.common, row.source)) || push(call, row) || !warp::any(aborted(params.common.wait));
    });
  }

 private:
  /// Waits until the owner has announced its selections, and finds which of the rows that the dispatch brought these
  /// still mean: bit k of `rows` is that of selection k, whose `weight` is in lane k. False: the owner is masked now,
  /// or the call is over.
  DEEP_EP_DEVICE bool await_choice(const Call& call, const CombineRow& row, std::uint32_t& rows, float& weight) const {
    const int selection = row.token * params.num_topk + lane_index();
    const bool counts = params.wait_cost != nullptr && warp == 0 && lane_index() == 0;
    // The sum of this and the one below is the time. In between the word says nothing.
    if (counts) add_relaxed<Scope::gpu>(params.wait_cost + row.source, -clock_cycles());
    const auto chosen = [&](const Poll&) {
      Selection now{.known = lane_index() >= params.num_topk};
      if (!now.known && call.has_begun(row.source)) {
        now = call.load_announced(row.source, selection);
      }
      if (!warp::all(now.known)) return false;
      const int expert = now.expert(params) - params.common.rank * params.num_local_experts;  // local
      const bool here = expert >= 0 && expert < params.num_local_experts;
      // It is the expert of the dispatch; or the call is over.
      const std::int32_t in_expert = row.position - expert * params.expert_rows;  // if it is the row of that expert
      const bool other = here && (row.position < 0 || in_expert < 0 || in_expert >= params.expert_rows);
      if (other) {
        call.refuse(row.source, 1, now.index.low, static_cast<std::uint64_t>(row.token));
      }
      rows = warp::ballot(here);
      weight = now.weight;
      return !warp::any(other);
    };
    const Awaited awaited{row.source, Wanted::low_latency_combine_selection, call.epoch};
    const bool there = wait_until<WholeWarp>(call, awaited, chosen);
    if (counts) add_relaxed<Scope::gpu>(params.wait_cost + row.source, clock_cycles());
    return there;
  }
  /// Sends this warp's share of the row to its owner: the weighted sum of the rows that the dispatch brought, or, where
  /// the owner wants one of them, that row. False: it is not sent, see await_choice().
  ///
  /// A thread has as many loads in flight as registers allow, whether they are many vectors of one row or few of many.
  /// The first ones start before the owner has announced which of these rows it wants: nearly always all of them.
  DEEP_EP_DEVICE bool push(const Call& call, const CombineRow& row) const {
    static_assert(kTogether % kLines == 0);
    const int steps = line_steps(kLines), vectors = format().vectors;
    const auto* const x = reinterpret_cast<const Vec16*>(params.x);
    std::byte* const to = destination(call, row);
    const auto own_weight = [&] { return load_weak(params.table().weight(row.source, row.index, lane_index())); };
    float weight = kWeighted && lane_index() < params.num_topk ? own_weight() : 0;
    bool chosen = false;
    std::uint32_t rows = warp::ballot(row.position >= 0);
    std::uint32_t mark = 0;

    // Two lines at a time, and row by row within them: what is loaded next, and what is added next.
    std::uint32_t rows_to_load = rows, rows_to_add = rows;
    std::uint32_t line_to_add = first_line(kLines);
    int vector_to_load = LineLane().vector(line_to_add);
    float sum[kLines][8] = {};
    int loads = kLines * steps * count_bits(rows);
    int load = 0;
#pragma unroll 1
    do {
      // 1. Load.
      Vec16 loaded[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (load + i >= loads) continue;
        const std::int64_t from = warp::shuffle(row.position, lowest_bit(rows_to_load));
        const int vector = vector_to_load + i % kLines * LineLane::vectors(kWarpLines);
        if (vector < vectors) loaded[i] = load_stream(x + (from * vectors + vector));
        if (i % kLines != kLines - 1) continue;
        rows_to_load &= rows_to_load - 1;
        if (rows_to_load != 0) continue;
        rows_to_load = rows;
        vector_to_load += LineLane::vectors(line_step(kLines));
      }
      // 2. Which rows does the owner want?
      if (!chosen) {
        chosen = true;
        std::uint32_t choice = rows;
        if (!kWeighted && !await_choice(call, row, choice, weight)) return false;
        mark = call.sum_mark();
        if (count_bits(choice) == 1) {  // the owner multiplies
          weight = 1.0f;
          const int expert = warp::shuffle(row.position, lowest_bit(choice)) / params.expert_rows;
          mark = call.mark(CombineRowKind::row, params.common.rank * params.num_local_experts + expert);
        }
        if (choice != rows) {  // rare: begins again with the rows that are left
          rows = rows_to_load = rows_to_add = choice;
          loads = kLines * steps * count_bits(rows);
          vector_to_load = LineLane().vector(line_to_add);
          if (rows != 0) continue;
        }
        if (rows == 0) break;
      }
      // 3. Add, and store what is complete.
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (load + i >= loads) continue;
        fuse_row(sum[i % kLines], loaded[i], warp::shuffle(weight, lowest_bit(rows_to_add)));
        if (i % kLines != kLines - 1) continue;
        rows_to_add &= rows_to_add - 1;
        if (rows_to_add != 0) continue;
        store(to, line_to_add, call.tag(mark), call.is_sum(call.tag(mark)) ? format().rest_bits : -1, sum);
        rows_to_add = rows;
        line_to_add += line_step(kLines);
      }
      load += kTogether;
    } while (load < loads);
    if (call.is_far(row.source) && !call.uses_rails()) call.hand_over(row.source, row.index, warp);
    return true;
  }

  /// By a whole warp: stores two lines, four apart, and their rest of so many bits (-1: of one row, not of a sum). Sets
  /// the sums to zero.
  DEEP_EP_DEVICE void store(std::byte* to, std::uint32_t line, std::uint64_t tag, int rest_bits,
                            float (&sum)[kLines][8]) const {
    if (rest_bits >= 0) {
      add_half(sum[0], rest_bits);
      add_half(sum[1], rest_bits);
    }
    format().store(to, line, upper_halves(sum[0]), tag);
    format().store(to, line + kWarpLines, upper_halves(sum[1]), tag);
    if (rest_bits > 0) {
      const Vec16 first = lower_halves(sum[0]), second = lower_halves(sum[1]);
      // For the lane with the tag a half of both, as of their upper halves.
      const Vec16 bytes{upper_bytes(first, 0), upper_bytes(second, 0), upper_bytes(first, 2), upper_bytes(second, 2)};
      format().store_rest(to, line, rest_bits == 8 ? bytes : first, tag);
      if (rest_bits == 16) format().store_rest(to, line + kWarpLines, second, tag);
    }
    for (auto& of_line : sum) {
      for (float& channel : of_line) channel = 0.0f;
    }
  }

  /// In the window of the owner, or of the rank that adds up the rows for it; or where a poster finds it.
  DEEP_EP_DEVICE std::byte* destination(const Call& call, const CombineRow& row) const {
    const LowLatencyParams& common = params.common;
    const int owner = row.source;
    // A near owner that has announced this call has ended its receive part of the call before the last, as at most two
    // calls wait for their hooks: so the place is free without a look at what it has acknowledged.
    if (!call.is_far(owner)) return call.row(common.rank, row.token).in(common.heaps[owner]);
    if (!call.uses_rails()) return call.staged_row(owner, row.index).in(common.local);
    return call.row_of_member(owner, common.rank, row.token).in(common.heaps[call.rail(call.own_node(), owner)]);
  }
};

/// By one warp of a block that posts: all that a far rank gets from this rank over one lane in one call. `selections`:
/// where this block has gathered those of this rank.
template <class Call>
DEEP_EP_DEVICE void post_to(const LowLatencyCombineParams& params, CallPoster<Call>& poster, Place<Cell> selections) {
  const LowLatencyParams& common = params.common;
  const Call& call = poster.call;
  const int peer = poster.peer;

  // 1. As owner, the selections.
  if (poster.lane == 0) {
    const std::uint32_t bytes = static_cast<std::uint32_t>(params.num_tokens * params.num_topk) * sizeof(Cell);
    const Place<Cell> to = common.window.selections.at(call.epoch, common.rank);
    if (!poster.queue.put(to.offset, selections.offset, bytes, lane_index() == 0 && bytes != 0)) return;
    if (!poster.tell_rest(true)) return;
  }

  // 2. As expert side, the rows that pushing groups have staged, in the order of the owner's tokens. By rails the sums
  // of this node for these, each added up by the warps of a block; of other relays another rank has them.
  const bool sums = call.uses_rails();
  if (sums && !(call.is_relay(peer) && call.await_announced(peer))) return;
  const LowLatencyRowTable table = params.table();
  const int rows = sums ? params.max_tokens : load_weak(table.rows(peer));
  const int warps = sums ? block_warps() : static_cast<int>(params.warps_per_row);  // that share a row
  poster.post_rows(
      rows, peer, warps,
      [&](int row) {
        bool mine = row >= 0 && !sums;  // by rails, where the peer has announced an expert of this node
        for (int k = 0; sums && row >= 0 && k < params.num_topk; ++k) {
          mine = call.announced_member(peer, row, k) >= 0 || mine;
        }
        return !mine ? 0 : 1 + (sums ? row : load_weak(table.token(peer, row)));
      },
      [&](int row) {
        const std::byte* const staged = call.staged_row(peer, row).in(common.local);
        return params.format.bytes(
            call.is_sum(load_weak(reinterpret_cast<const std::uint64_t*>(staged + kTaggedPayload))));
      });
  poster.tell_rest();
}

/// By whole blocks that post: the selections, once for all ranks of this block; then each warp serves one rank, or one
/// lane to it.
template <class Call>
DEEP_EP_DEVICE void post_combine(const LowLatencyCombineParams& params, const Call& call, const CombineShared& shared) {
  const LowLatencyParams& common = params.common;
  const Place<Cell> staged = common.window.staged_selections.at(call.epoch, block_index() - common.working_blocks);
  if (params.phase.sends && call.first_posted() < common.num_far) {
    block::each(params.num_tokens * params.num_topk, [&](int i) {
      call.announce(Selection::load(params, i / params.num_topk, i % params.num_topk), staged.in(common.local) + i);
    });
  }
  block::sync();
  serve_lane(call, shared, params.phase.sends, [&](CallPoster<Call>& poster) { post_to(params, poster, staged); });
}

// By rails every warp of a block shares the row that it adds.
static_assert(kernels::combine_low_latency_rdma::kMaxThreads / 32 <= LowLatencyWindow::kMostWarpsPerRow);

/// kRdma: some ranks are reached by RDMA. kWeighted: the weights came with the dispatch. kUnreduced: rows travel as the
/// experts left them. Kernels of their own, so that the first one does not carry their registers and instructions.
template <bool kRdma, bool kWeighted, bool kUnreduced = false>
DEEP_EP_DEVICE void combine_body(const LowLatencyCombineParams& params, std::byte* memory) {
  using Adder = CombineAdder<kRdma, kUnreduced>;
  using Call = CombineCall<kRdma>;
  using Pusher = std::conditional_t<kUnreduced, UnreducedPusher, CombinePusher<Call, kWeighted>>;
  constexpr bool kAnnounced = !kWeighted && !kUnreduced;
  const LowLatencyParams& common = params.common;
  const bool masks = kAnnounced && common.mask != nullptr;
  const bool sends_part = params.phase.sends;
  const int warp = warp_index();
  const bool last_warp = warp == block_warps() - 1;
  const int groups = sends_part ? block_warps() / params.warps_per_row : 0;
  const int group = warp / params.warps_per_row;
  const int held_up = kUnreduced ? groups * params.held_up(groups * common.working_blocks) : 0;
  const CombineShared shared{{Carver(memory), common.num_ranks, kRdma ? block_warps() : 0}, held_up};
  const bool works = block_index() < common.working_blocks;
  // One block tells and awaits what concerns all ranks. If an SM is left for it, this block does nothing else.
  const bool tells = block_index() == (kRdma ? 0 : grid_blocks() - 1);
  const bool pushes = group < groups && works;
  const bool announces = kAnnounced && sends_part && works;
  // The tokens of this block: this one, and others a grid apart. Two blocks share one if there are so many.
  const int by_two = !kRdma && common.mask == nullptr && 2 * params.num_tokens <= common.working_blocks ? 1 : 0;
  const int first = works ? block_index() >> by_two : params.num_tokens;

  // 1. Loads under way: the first row to push, unless a call has failed: then the table of the dispatch may not be
  // whole; the selection that this thread announces first, or those of the first token to add.
  Pusher pusher{{params, shared, group, groups, warp % params.warps_per_row}};
  const bool failed = pushes && aborted(common.wait);
  if (pushes) pusher.load_first(kUnreduced);
  block::each(held_up, [&](int i) { shared.pushed[i] = 0; });
  Selection loaded{};
  const int k = kUnreduced ? lane_index() : thread_index() % params.num_topk;
  const bool loads = kUnreduced ? !sends_part && k < params.num_topk
                                : announces && thread_index() < common.num_ranks * params.num_topk;
  const int its_token = kUnreduced ? first : block_index();
  if (loads && its_token < params.num_tokens) loaded = Selection::load(params, its_token, k);

  // 2. Which call is this? The last warp then does what no other waits for: it tells the peers which call this rank is
  // done with. With two calls in flight the next one may be what waits for room: so receive parts without announcements
  // are acknowledged when all is done.
  if (is_middle_thread()) {
    shared.words->meaning = params.call_shape ^ static_cast<std::uint32_t>(load_weak(params.table().epoch()));
  }
  shared.begin<LowLatencyKind::combine>(common, params.phase);
  const CallWords::Epochs epochs = shared.words->epochs;
  const std::uint32_t& meaning = shared.words->meaning;
  const Call sending{{common, epochs.send, params.row_bytes}, params, meaning};
  const Call receiving{{common, epochs.receive, params.row_bytes}, params, meaning};
  if (last_warp && tells && (kAnnounced || sends_part)) {
    sending.acknowledge_all(epochs.receive - 1, masks && sends_part);
    warp::sync();
  }
  if (kRdma && !works) return post_combine(params, sending, shared);

  // 3. As owner, tell the expert ranks which of their rows count, and how much. As expert side, push rows.
  if (announces) announce(params, sending, shared, loaded);
  const bool room = kAnnounced || !sends_part || shared.await_room(sending, 0, common.num_ranks);
  if (kWeighted && sends_part && room && tells && warp == 0) sending.announce_meaning();
  if (pushes && room && !warp::any(failed)) pusher.push_all(sending);
  if (last_warp && tells && masks && sends_part) {  // until all ranks that will come have begun
    warp::each(common.num_ranks, [&](int peer) {
      if (!masked(common, peer)) sending.await_progress(peer, 0, Wanted::low_latency_combine_selection);
    });
  }

  // 4. Add up the rows that come; where ranks are masked, with the same ranks in all tokens.
  if (params.phase.receives) {
    if (!kAnnounced && last_warp && tells) receiving.await_meanings();
    const int member = (block_index() & by_two) * block_warps() + warp;
    const Adder adder{params, receiving, member, block_warps() << by_two, loaded, first};
    receive_with_masks<kAnnounced>(common, LowLatencyKind::combine, *shared.words, [&](bool again) {
      adder.add_all(again ? 0 : first, again ? 1 : common.working_blocks);
    });
  }
  if (kAnnounced || (kWeighted && sends_part)) return;

  // 5. If the call is not over, the last block tells the peers: that all rows are there (what others wrote in a send
  // part is ordered before), or that they may send the call after the next (and what they read).
  block::sync();
  std::uint32_t& arrived = common.counters(LowLatencyKind::combine).arrived;
  const auto blocks = static_cast<std::uint32_t>(grid_blocks());
  const bool last = thread_index() == 0 && (kUnreduced && sends_part ? last_to_arrive<Scope::system>(&arrived, blocks)
                                                                     : last_to_arrive<Scope::gpu>(&arrived, blocks));
  if (warp != 0 || !warp::any(last && !aborted(common.wait))) return;
  warp::sync();
  if (!sends_part) return receiving.acknowledge_all(epochs.receive);
  fence<Scope::system>();  // releases what all blocks have sent
  sending.announce_meaning();
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency, (deep_ep::device::low_latency::combine_body<false, false>))
DEEP_EP_DEFINE_KERNEL(combine_low_latency_weighted, (deep_ep::device::low_latency::combine_body<false, true>))
DEEP_EP_DEFINE_KERNEL(combine_low_latency_rdma, (deep_ep::device::low_latency::combine_body<true, false>))
DEEP_EP_DEFINE_KERNEL(combine_low_latency_unreduced, (deep_ep::device::low_latency::combine_body<false, false, true>))
