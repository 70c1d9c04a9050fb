// Low-latency combine: for each token of this rank, the weighted sum of what the experts made of it.
//
// Each rank sums the rows of its own experts and sends one row per token to the token's owner, which adds up the ranks'
// rows (add.hpp). Send part: owners announce their tokens' selections, expert ranks sum and push. Receive part: owners
// add.
//
// What waits for what, which decides how long a call with few tokens takes:
//   owner     counters, selections, acknowledgements (one load time) -> cells to the peers (one trip)
//   expert    row table (one load time) -> rows of x (one load time), meanwhile the cells come -> lines to the owner
//             (one trip)
//   owner     lines, as they are polled -> result
//   by rails  lines, as the owner's rail in this node polls and adds them -> its NIC -> owner (peers.hpp)
// There is no barrier of the grid, and ranks wait for each other only here.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/combine/add.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// One thread's part of the announcement of this block's tokens: a token has a cell for each peer and selection, and
/// the threads share them. What the first cell needs is loaded when this is made, before the epoch is known.
template <class Call>
struct Announcer {
  const LowLatencyCombineParams& params;
  int cells;  ///< 0: nothing is announced
  Selection first{};
  std::uint64_t acknowledged = 0;  ///< by the first cell's peer

  /// `call`: none yet.
  DEEP_EP_DEVICE Announcer(const LowLatencyCombineParams& p, const Call& call, bool wanted)
      : params(p), cells(wanted ? p.common.num_ranks * p.num_topk : 0) {
    if (thread_index() >= cells || block_index() >= params.num_tokens) return;
    first = Selection::load(params, block_index(), thread_index() % params.num_topk);
    acknowledged = call.load_acknowledged(thread_index() / params.num_topk);
  }

  /// A peer's cells are free once it has said that it is done with the call before the last.
  DEEP_EP_DEVICE void announce(const Call& call, std::uint32_t meaning) const {
    const LowLatencyParams& common = params.common;
#pragma unroll 1
    for (int token = block_index(); token < params.num_tokens; token += common.working_blocks) {
#pragma unroll 1
      for (int cell = thread_index(); cell < cells; cell += block_threads()) {
        const bool is_first = token == block_index() && cell == thread_index();
        const int peer = cell / params.num_topk;
        const int k = cell % params.num_topk;
        if (masked(common, peer) || call.is_far(peer)) continue;
        if (!call.has_room(is_first ? acknowledged : call.load_acknowledged(peer)) && !call.await_room(peer)) continue;
        const Selection selection = is_first ? first : Selection::load(params, token, k);
        Cell* const to = common.window.selections(call.epoch, common.rank).in(common.heaps[peer]);
        selection.announce(params, to + token * params.num_topk + k, call.epoch, meaning);
      }
    }
  }
};

/// The owner's choice: which of the rows that the dispatch brought it still selects.
struct CombineChoice {
  std::uint32_t rows;  ///< bit k: that of selection k
  float weight;        ///< in lane k
};

/// The expert side: for each row that the dispatch brought, this rank weights, sums and rounds what its experts made of
/// the token, and sends it to the token's owner as one row.
///
/// Groups of warps take rows in turn (ReceivedRows), those of an owner in token order, so that it can begin to add. The
/// warps of a group share a row by its lines and need nothing from each other: each looks for the owner's selections,
/// sums its channels and stores its lines.
template <class Call>
struct CombinePusher {
  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  ReceivedRows received;
  int warp;                      ///< in the group
  const std::uint32_t& meaning;  ///< see meaning_of()

  static constexpr int kTogether = 8;  ///< loads of a thread that are under way at once

  /// All rows in turn.
  DEEP_EP_DEVICE void push_all(const Call& call) const {
    // By rails rows go to other ranks than those that announce that they want them.
    if (call.uses_rails() && !await_relays(call)) return;
    received.each([&](const CombineRow& row, int) {
      // The same for all lanes, even while another warp masks the rank.
      return warp::any(masked(params.common, row.source)) || push(call, row) || !warp::any(aborted(params.common.wait));
    });
  }

 private:
  /// By rails: waits for room at the ranks of this node. False: the call is over.
  DEEP_EP_DEVICE bool await_relays(const Call& call) const {
    bool there = true;
    warp::each(params.common.rail_width,
               [&](int rank) { there = call.await_room(call.own_node() * params.common.rail_width + rank) && there; });
    return warp::agree(there);
  }
  /// Waits until the owner has announced its selections, and makes the choice. False: the owner is masked now, or the
  /// call is over.
  DEEP_EP_DEVICE bool await_choice(const Call& call, const CombineRow& row, CombineChoice& choice) const {
    count_wait(row.source, -1);
    const int selection = row.token * params.num_topk + lane_index();
    const bool there =
        wait_until<WholeWarp>(call.policy(), {row.source, Wanted::low_latency_combine_selection, call.epoch},
                              [&](const Poll&) { return choose(call, row, selection, choice); });
    count_wait(row.source, 1);
    return there;
  }
  /// `sign` -1: a wait begins, whose time is taken off; 1: it ends, and the time is added.
  DEEP_EP_DEVICE void count_wait(int source, int sign) const {
    if (params.wait_cost == nullptr || warp != 0 || lane_index() != 0) return;
    add_relaxed<Scope::gpu>(params.wait_cost + source, sign * clock_cycles());
  }

  /// Finds the rows that the owner's selections mean. False: it has not said yet, or the call is over.
  DEEP_EP_DEVICE bool choose(const Call& call, const CombineRow& row, int selection, CombineChoice& choice) const {
    Selection now{-1, 0.0f};
    const bool there = lane_index() >= params.num_topk ||
                       (call.has_begun(row.source) &&
                        load_announced(call, meaning, row.source, call.selections(row.source) + selection, now));
    if (!warp::all(there)) return false;
    const int first_expert = params.common.rank * params.num_local_experts;
    const int expert = now.expert(params) - first_expert;  // local
    const bool here = expert >= 0 && expert < params.num_local_experts;
    // It is the expert of the dispatch; or the call is over.
    const std::int32_t in_expert = row.position - expert * params.expert_rows();  // if it is the row of that expert
    const bool other = here && (row.position < 0 || in_expert < 0 || in_expert >= params.expert_rows());
    if (other) {
      refuse_call(params.common, row.source, 1, static_cast<std::uint64_t>(now.index),
                  static_cast<std::uint64_t>(row.token));
    }
    if (warp::any(other)) return false;
    choice = {warp::ballot(here), now.weight};
    return true;
  }

  /// Sends this warp's share of the row to its owner: the weighted sum of the rows that the dispatch brought. False:
  /// it is not sent, see await_choice().
  ///
  /// A thread has as many loads in flight as registers allow, whether they are many vectors of one row or few of many.
  /// The first ones start before the owner has announced which of these rows it wants: nearly always all of them.
  DEEP_EP_DEVICE bool push(const Call& call, const CombineRow& row) const {
    const WarpShare share{warp, params.warps_per_row};
    const int steps = share.steps(wire);
    std::byte* const to = destination(call, row);
    CombineChoice choice{};
    bool chosen = false;
    std::uint32_t rows = warp::ballot(row.position >= 0);

    // Line by line, and row by row within one: what is loaded next, and what is added next.
    std::uint32_t rows_to_load = rows, rows_to_add = rows;
    std::uint32_t line_to_load = share.first_line(), line_to_add = line_to_load;
    float sum[8] = {};
    int pieces = steps * count_bits(rows);
    int piece = 0;
#pragma unroll 1
    do {
      // 1. Load.
      Vec16 loaded[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (piece + i >= pieces) continue;
        const std::int64_t from = warp::shuffle(row.position, lowest_bit(rows_to_load));
        const int vector = wire.vector(line_to_load);
        if (vector >= 0) {
          loaded[i] = load_stream(reinterpret_cast<const Vec16*>(params.x) + from * wire.vectors() + vector);
        }
        rows_to_load &= rows_to_load - 1;
        if (rows_to_load != 0) continue;
        rows_to_load = rows;
        line_to_load += share.step();
      }
      // 2. Which rows does the owner want?
      if (!chosen) {
        chosen = true;
        if (!await_choice(call, row, choice)) return false;
        if (choice.rows != rows) {  // rare: begins again with the rows that are left
          rows = rows_to_load = rows_to_add = choice.rows;
          pieces = steps * count_bits(rows);
          line_to_load = line_to_add;
          if (rows != 0) continue;
        }
        if (rows == 0) break;
      }
      // 3. Add, and store what is complete.
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (piece + i >= pieces) continue;
        add_weighted(sum, loaded[i], warp::shuffle(choice.weight, lowest_bit(rows_to_add)));
        rows_to_add &= rows_to_add - 1;
        if (rows_to_add != 0) continue;
        wire.store(to, line_to_add, pack_sum(sum), call.epoch);
        for (float& part : sum) part = 0.0f;
        rows_to_add = rows;
        line_to_add += share.step();
      }
      piece += kTogether;
    } while (piece < pieces);
    if (call.is_far(row.source) && !call.uses_rails()) call.hand_over(row.source, row.index, warp);
    return true;
  }

  /// In the window of the owner, or of the rank that adds up the rows for it; or where a poster finds it.
  DEEP_EP_DEVICE std::byte* destination(const Call& call, const CombineRow& row) const {
    const LowLatencyParams& common = params.common;
    const int owner = row.source;
    if (!call.is_far(owner)) return call.row(common.heaps[owner], common.rank, row.token);
    if (!call.uses_rails()) return call.staged_row(owner, row.index).in(common.local);
    return call.row_of_member(common.heaps[call.relay(owner)], owner, common.rank, row.token);
  }
};

/// In blocks that post to far ranks: the selections of this rank's tokens, as owner, and the rows that pushing groups
/// have staged, as expert side, in the order of the owner's tokens.
template <class Call>
struct CombinePoster {
  const LowLatencyCombineParams& params;
  const Call& call;
  CallPoster<Call>& poster;
  const std::uint32_t& meaning;  ///< see meaning_of()

  /// By one warp: posts all that the peer gets from this rank by one lane in one call.
  DEEP_EP_DEVICE void post_all() const {
    if (poster.is_first_lane() && !post_selections()) return;
    if (call.uses_rails() && !call.is_relay(peer())) return;  // another rank of this node has its sums
    if (post_rows()) poster.tell_rest();
  }

  /// Where this block of posters gathers the selections of this rank.
  DEEP_EP_DEVICE static Place<Cell> staged_selections(const Call& call) {
    return call.common.staging.selections(call.epoch, block_index() - call.common.working_blocks);
  }

 private:
  DEEP_EP_DEVICE const LowLatencyParams& common() const { return params.common; }
  DEEP_EP_DEVICE int peer() const { return poster.peer(); }

  DEEP_EP_DEVICE bool post_selections() const {
    const std::uint32_t bytes = static_cast<std::uint32_t>(params.num_tokens * params.num_topk) * sizeof(Cell);
    const Place<Cell> to = common().window.selections(call.epoch, common().rank);
    if (!poster.put(to, staged_selections(call), bytes, lane_index() == 0 && bytes != 0)) return false;
    if (!poster.progress(0)) return false;
    poster.flush();
    return true;
  }

  /// Rows of this rank; or by rails the sums of its node for the peer's tokens, each added up by the warps of a block.
  DEEP_EP_DEVICE bool post_rows() const {
    const bool sums = call.uses_rails();
    if (sums && !call.await_announced(peer())) return false;
    const LowLatencyRowTable table = table_of(params);
    const int rows = sums ? params.max_tokens : load_stream(table.rows(peer()));
    const int warps = sums ? block_warps() : static_cast<int>(params.warps_per_row);
    for (int begin = 0; begin < rows; begin += kWarpSize) {
      const int number = begin + lane_index();
      const bool mine = number < rows && (!sums || has_sum(number));
      const int row = mine ? number : 0;
      const int token = mine && !sums ? load_stream(table.token(peer(), row)) : row;
      const Place<std::byte> to = common().window.row(Call::kCall, call.epoch, common().rank, token, call.row_bytes);
      const auto staged = [&] { return is_staged(call.staged_flag(peer(), row), warps); };
      if (!poster.post_rows(mine, token + 1, to, call.staged_row(peer(), row), staged)) return false;
    }
    return true;
  }

  /// Has a rank of this node an expert of the peer's token, as the peer has announced?
  DEEP_EP_DEVICE bool has_sum(int token) const {
    bool has = false;
    for (int k = 0; k < params.num_topk; ++k) {
      const int rank = announced_rank(params, call, meaning, peer(), token, k);
      has = has || (rank >= 0 && call.in_own_node(rank));
    }
    return has;
  }

  /// Are all `warps` that share a row done with it?
  DEEP_EP_DEVICE bool is_staged(const std::uint64_t* ready, int warps) const {
    for (int warp = 0; warp < warps; ++warp) {
      if (load_relaxed<Scope::gpu>(ready + warp) != call.epoch) return false;
    }
    fence<Scope::gpu>();  // acquires what all of them released
    return true;
  }
};

/// By whole blocks that post: the selections, once for all ranks of this block; then each warp serves one rank, or one
/// lane to it.
template <class Call>
DEEP_EP_DEVICE void post_combine(const LowLatencyCombineParams& params, const Call& call, std::uint64_t received,
                                 const CombineShared& shared) {
  const std::uint32_t meaning = shared.words->meaning;
  if (sends(params.phase) && call.posts_first_lanes()) {
    Cell* const staged = CombinePoster<Call>::staged_selections(call).in(params.common.local);
    block::each(params.num_tokens * params.num_topk, [&](int i) {
      Selection::load(params, i / params.num_topk, i % params.num_topk)
          .announce(params, staged + i, call.epoch, meaning);
    });
  }
  block::sync();
  serve_lane(call, received, sends(params.phase), params.common.mask != nullptr, shared.posters,
             [&](CallPoster<Call>& poster) {
               CombinePoster<Call>{params, call, poster, meaning}.post_all();
             });
}

// By rails every warp of a block shares the row that it adds.
static_assert(kernels::combine_low_latency_rdma::kMaxThreads / 32 <=
              static_cast<int>(LowLatencyStaging::kMostWarpsPerRow));

/// By one warp, where ranks may be masked: waits until all that will come have begun the call.
template <class Call>
DEEP_EP_DEVICE void await_all_begun(const Call& call) {
  const LowLatencyParams& common = call.common;
  warp::each(common.num_ranks, [&](int peer) {
    if (masked(common, peer)) return;
    const std::uint64_t* begun = common.window.begun(LowLatencyKind::combine, peer).in(common.local);
    wait_signal(call.policy(), begun, {peer, Wanted::low_latency_combine_selection, call.epoch});
  });
}

/// kRdma: some ranks are reached by RDMA. A kernel of its own, so that the other one does not carry its registers and
/// instructions.
template <bool kRdma>
DEEP_EP_DEVICE void combine_body(const LowLatencyCombineParams& params, std::byte* memory) {
  using Call = CombineCall<kRdma>;
  const LowLatencyParams& common = params.common;
  const CombineWire wire{params.hidden};
  const bool masks = common.mask != nullptr;
  const int warp = warp_index();
  const int groups = sends(params.phase) ? block_warps() / params.warps_per_row : 0;
  const int group = warp / params.warps_per_row;
  const CombineShared shared(Carver(memory), 0);
  const Call no_call(common, 0, params.row_bytes);
  const bool posts = no_call.is_poster();
  const bool pushes = group < groups && !posts;

  // 1. Loads under way.
  CombinePusher<Call> pusher{params, wire, {params, group, groups}, warp % params.warps_per_row, shared.words->meaning};
  if (pushes) pusher.received.load_first();
  const Announcer<Call> announcer(params, no_call, sends(params.phase) && !posts);

  // 2. Which call is this? The last warp then does what no other waits for: it tells the peers which call this rank is
  // done with, and moves the counters on.
  const bool last_warp = warp == block_warps() - 1;
  const LowLatencyEpochs epochs = read_epochs(params, *shared.words, last_warp);
  const Call sending(common, epochs.send, params.row_bytes);
  if (last_warp) {
    if (block_index() == 0) sending.acknowledge_all(epochs.receive - 1, masks && sends(params.phase));
    if (lane_index() == 0) common.counters(LowLatencyKind::combine).arrive(epochs, params.phase);
    warp::sync();
  }
  if constexpr (kRdma) {
    if (posts) return post_combine(params, sending, epochs.receive - 1, shared);
  }

  // 3. As owner, tell the expert ranks which of their rows count, and how much. As expert side, push rows.
  announcer.announce(sending, shared.words->meaning);
  if (pushes) pusher.push_all(sending);
  if (last_warp && block_index() == 0 && masks && sends(params.phase)) await_all_begun(sending);
  if (!receives(params.phase)) return;

  // 4. Add up the rows that come; where ranks are masked, with the same ranks in all tokens.
  const Call receiving(common, epochs.receive, params.row_bytes);
  const CombineAdder<kRdma> adder{params, wire, receiving, shared.words->meaning, warp, block_warps()};
  receive_with_masks(common, LowLatencyKind::combine, shared.words->masks,
                     [&](bool again) { adder.add_all(again ? 0 : block_index(), again ? 1 : common.working_blocks); });
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency, deep_ep::device::low_latency::combine_body<false>)
DEEP_EP_DEFINE_KERNEL(combine_low_latency_rdma, deep_ep::device::low_latency::combine_body<true>)
