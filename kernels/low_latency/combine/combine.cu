// Low-latency combine: for each token of this rank, the weighted sum of what the experts made of it.
//
// Each rank sums the rows of its own experts and sends one row per token to the token's owner, which adds up the ranks'
// rows. Send part: owners announce their tokens' selections, expert ranks sum and push. Receive part: owners add.
//
// What waits for what, which decides how long a call with few tokens takes:
//   owner     counters, selections, acknowledgements (one load time) -> cells to the peers (one trip)
//   expert    row table (one load time) -> rows of x (one load time), meanwhile the cells come -> lines to the owner
//             (one trip)
//   owner     lines, as they are polled -> result
//   by rails  lines, as the owner's rail in this node polls and adds them -> its NIC -> owner (transport/reach.hpp)
// There is no barrier of the grid, and ranks wait for each other only here.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/combine/add.hpp"
#include "kernels/low_latency/combine/push.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/low_latency/transport/poster.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

// The blocks of the low-latency combine that post to far ranks. As owner: the selections of this rank's tokens. As
// expert side: the rows that pushing groups have staged, in the order of the owner's tokens.

/// Where this block of posters gathers the selections of this rank.
template <class Reach>
DEEP_EP_DEVICE Place<std::uint64_t> staged_selections(const Reach& reach) {
  return reach.common.staging.selections(reach.epoch, block_index() - reach.common.working_blocks);
}

template <class Reach>
struct CombinePoster {
  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  const Reach& reach;
  CallPoster<Reach>& poster;

  /// By one warp: posts all that the peer gets from this rank by one lane in one call.
  DEEP_EP_DEVICE void post_all() const {
    if (poster.is_first_lane() && !post_selections()) return;
    if (reach.by_rails() ? !reach.has_rail_to(peer()) || post_sums() : post_rows()) {
      poster.tell_rest();
    }
  }

 private:
  DEEP_EP_DEVICE const LowLatencyParams& common() const { return params.common; }
  DEEP_EP_DEVICE int peer() const { return poster.peer(); }

  DEEP_EP_DEVICE bool post_selections() const {
    const std::uint32_t bytes = FarSelections::bytes(params);
    const Place<std::uint64_t> to{common().window.selections(reach.epoch, common().rank, 0).offset};
    if (!poster.put(to, staged_selections(reach), bytes, lane_index() == 0)) return false;
    if (!poster.progress(0)) return false;
    poster.flush();
    return true;
  }

  DEEP_EP_DEVICE bool post_rows() const {
    const LowLatencyRowTable table{const_cast<std::int32_t*>(params.row_table), common().num_ranks, params.max_tokens,
                                   params.num_topk};
    const std::int32_t rows = load_stream(table.rows(peer()));
    for (int begin = 0; begin < rows; begin += kWarpSize) {
      const int row = begin + lane_index();
      const bool mine = row < rows;
      const std::int32_t token = mine ? load_stream(table.token(peer(), row)) : 0;
      if (!post_batch(mine && poster.takes(token), row, token, params.warps_per_row)) return false;
    }
    return true;
  }

  /// By rails: the sums of this node for the peer's tokens, each added up by the warps of a block.
  DEEP_EP_DEVICE bool post_sums() const {
    const FarSelections announced{params, reach.far_selections(peer())};
    const int count = announced.await_count(reach, peer());
    for (int begin = 0; begin < count; begin += kWarpSize) {
      const int token = begin + lane_index();
      bool mine = false;
      for (int k = 0; token < count && k < params.num_topk; ++k) {
        const int rank = announced.rank_of_selection(token, k);
        mine = mine || (rank >= 0 && reach.is_of_own_node(rank));
      }
      if (!post_batch(mine && poster.takes(token), token, token, block_warps())) return false;
    }
    return true;
  }

  /// For each lane with `mine`: posts row `row` of the staging memory, for the peer's token `token`, once the `warps`
  /// that share it have staged it.
  DEEP_EP_DEVICE bool post_batch(bool mine, int row, std::int32_t token, int warps) const {
    if (!mine) row = 0;
    const Place<std::byte> from = reach.staged_row(peer(), row);
    const Place<std::byte> to = common().window.row(Reach::kCall, reach.epoch, common().rank, token, reach.row_bytes);
    return poster.post_rows(
        mine, token + 1, [&] { return state_of(reach.staged_flag(peer(), row, 0), warps); },
        [&](bool posts) { return poster.put(to, from, wire.bytes(), posts); });
  }

  /// All `warps` that share a row come to the same result, though not at the same time.
  DEEP_EP_DEVICE StagedRow state_of(const std::uint64_t* ready, int warps) const {
    const std::uint64_t no_row = LowLatencyStaging::no_row_flag(reach.epoch);
    bool there = true;
    bool nothing = false;
    for (int warp = 0; warp < warps; ++warp) {
      const std::uint64_t seen = load_relaxed<Scope::gpu>(ready + warp);
      nothing = nothing || seen == no_row;
      there = there && (seen == reach.epoch || seen == no_row);
    }
    if (!there) return StagedRow::awaited;
    fence<Scope::gpu>();  // acquires what all of them released
    return nothing ? StagedRow::nothing : StagedRow::staged;
  }
};

/// By whole blocks.
template <class Reach>
DEEP_EP_DEVICE void post_combine(const LowLatencyCombineParams& params, const CombineWire& wire,
                                 const CombineShared& shared) {
  const LowLatencyParams& common = params.common;

  // 1. Which call is this? The selections, once for all ranks of this block.
  LowLatencyCounters& counters = common.counters(LowLatencyKind::combine);
  if (thread_index() == 0) shared.words->epochs = counters.epochs();
  block::sync();
  const LowLatencyEpochs epochs = shared.words->epochs;
  if (thread_index() == 0) counters.arrive(epochs, params.phase);
  const Reach reach(common, epochs.send, params.row_bytes);
  if (sends(params.phase) && reach.posts_first_lanes()) {
    const Selections selections{params};
    std::uint64_t* staged = staged_selections(reach).in(common.local);
    if (thread_index() == 0) staged[0] = FarSelections::head(params);
    for (int i = thread_index(); i < params.num_tokens * params.num_topk; i += block_threads()) {
      staged[1 + i] = selections.packed(selections.load(i / params.num_topk, i % params.num_topk)).packed(0);
    }
  }
  block::sync();

  // 2. Each warp serves one rank, or one lane to it.
  const PostedLane to = reach.posted();
  if (to.rank < 0 || warp::any(masked(common, to.rank))) return;
  CallPoster poster(reach, to, shared.posters[warp_index()]);
  bool on = !poster.is_first_lane() || poster.acknowledge(epochs.receive - 1);
  if (sends(params.phase)) {
    on = on && (common.mask == nullptr || !poster.is_first_lane() || poster.begin());
    if (on && poster.await_room()) CombinePoster<Reach>{params, wire, reach, poster}.post_all();
  }
  poster.await_earlier();
  poster.close();
}

// By rails every warp of a block shares the row that it adds.
static_assert(kernels::combine_low_latency_rdma::kMaxThreads / 32 <=
              static_cast<int>(LowLatencyStaging::kMostWarpsPerRow));

/// By one warp, where ranks may be masked: waits until all that will come have begun the call.
template <bool kRdma>
DEEP_EP_DEVICE void await_all_begun(const LowLatencyParams& common, std::uint64_t epoch) {
#pragma unroll 1
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarpSize) {
    if (masked(common, peer)) continue;
    const std::uint64_t* begun = common.window.begun(LowLatencyKind::combine, peer).in(common.local);
    wait_signal(MaskOrEnd<kRdma, true>{common, epoch}, begun, {peer, Wanted::low_latency_combine_selection, epoch});
  }
}

/// kRdma: some ranks are reached by RDMA. A kernel of its own, so that the other one does not carry its registers and
/// instructions.
template <bool kRdma>
DEEP_EP_DEVICE void combine_body(const LowLatencyCombineParams& params, std::byte* memory) {
  using Reach = CombineReach<kRdma>;
  const LowLatencyParams& common = params.common;
  const CombineWire wire{params.hidden};
  const bool masks = common.mask != nullptr;
  const int warp = warp_index();
  const int groups = sends(params.phase) ? block_warps() / params.warps_per_row : 0;
  const int group = warp / params.warps_per_row;
  const bool pushes = group < groups;
  const std::size_t stage_bytes = groups == 0 ? 0 : WarpShare{0, params.warps_per_row}.stage_bytes(wire);
  const CombineShared shared(Carver(memory), params.block_warps, stage_bytes, params.rows_of_group, 0);
  const Reach no_call(common, 0, params.row_bytes);
  if constexpr (kRdma) {
    if (no_call.posts()) return post_combine<Reach>(params, wire, shared);
  }

  // 1. Loads under way.
  CombinePusher<Reach> pusher{params,
                              wire,
                              group,
                              groups,
                              warp % params.warps_per_row,
                              shared.words->call,
                              shared.deferred(warp),
                              shared.stage(warp)};
  if (pushes) pusher.load_first();
  const Announcer<Reach> announcer(params, no_call, sends(params.phase));

  // 2. Which call is this? The clerk then does what nobody waits for: it tells the peers which call this rank is done
  // with, and moves the counters on.
  const bool clerk = warp == block_warps() - 1;
  const LowLatencyEpochs epochs = read_epochs(params, *shared.words, clerk);
  const Reach sending(common, epochs.send, params.row_bytes);
  if (clerk) {
    if (block_index() == 0) sending.acknowledge_all(epochs.receive - 1, masks && sends(params.phase));
    if (lane_index() == 0) common.counters(LowLatencyKind::combine).arrive(epochs, params.phase);
    warp::sync();
  }

  // 3. As owner, tell the expert ranks which of their rows count, and how much. As expert side, push rows.
  announcer.announce(sending, shared.words->call);
  if (pushes) pusher.push_all(sending);
  if (clerk && block_index() == 0 && masks && sends(params.phase)) {
    await_all_begun<kRdma>(common, epochs.send);
  }
  if (!receives(params.phase)) return;

  // 4. Add up the rows that come; where ranks are masked, with the same ranks in all tokens.
  const CombineAdder<kRdma> adder{params, wire, Reach(common, epochs.receive, params.row_bytes), warp,
                                  params.block_warps};
  int first = block_index();
  int step = common.working_blocks;
#pragma unroll 1
  for (bool again = false;; again = true) {
    adder.add_all(first, step);
    if (!masks) return;
    if (!again) {
      finish_with_masks(common, LowLatencyKind::combine, shared.words->masks);
      first = 0;
      step = 1;
    } else {
      // Ranks may be masked meanwhile, each once.
      compare_masks(common, shared.words->masks);
    }
    if (shared.words->masks.again == 0) return;
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency, deep_ep::device::low_latency::combine_body<false>)
DEEP_EP_DEFINE_KERNEL(combine_low_latency_rdma, deep_ep::device::low_latency::combine_body<true>)
