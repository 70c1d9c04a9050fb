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
//   by rails  lines, as the owner's rail in this node polls and adds them -> its NIC -> owner (rdma/reach.hpp)
// There is no barrier of the grid, and ranks wait for each other only here.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/combine/add.hpp"
#include "kernels/low_latency/combine/post.hpp"
#include "kernels/low_latency/combine/push.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

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

/// Rows travel as bfloat16 or in FP8; by NVLink alone, or to some ranks by RDMA. By NVLink alone, the two forms have
/// kernels of their own: with the registers of the other one, bfloat16 rows would have fewer warps.
template <bool kFp8, bool kRdma>
DEEP_EP_DEVICE void combine_body(const LowLatencyCombineParams& params, std::byte* memory) {
  using Reach = typename CombineAdder<kFp8, kRdma>::Reach;
  const LowLatencyParams& common = params.common;
  const CombineWire wire{params.hidden, kFp8};
  const bool masks = common.mask != nullptr;
  const int warp = warp_index();
  const int groups = sends(params.phase) ? block_warps() / params.warps_per_row : 0;
  const int group = warp / params.warps_per_row;
  const bool pushes = group < groups;
  const std::size_t stage_bytes = groups == 0 ? 0 : CombineShared::stage_bytes(wire, params.warps_per_row, false);
  const CombineShared shared(Carver(memory), params.block_warps, stage_bytes, params.rows_of_group, 0);
  const Reach no_call(common, 0, params.row_bytes);
  if constexpr (kRdma) {
    if (no_call.posts()) return post_combine<Reach>(params, wire, shared);
  }

  // 1. Loads under way.
  CombinePusher<kFp8, Reach> pusher{params,
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
  const CombineAdder<kFp8, kRdma> adder{params, wire, Reach(common, epochs.receive, params.row_bytes), warp,
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

DEEP_EP_DEVICE void combine_rdma(const LowLatencyCombineParams& params, std::byte* memory) {
  return params.fp8 ? combine_body<true, true>(params, memory) : combine_body<false, true>(params, memory);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency, (deep_ep::device::low_latency::combine_body<false, false>))
DEEP_EP_DEFINE_KERNEL(combine_low_latency_fp8, (deep_ep::device::low_latency::combine_body<true, false>))
DEEP_EP_DEFINE_KERNEL(combine_low_latency_rdma, deep_ep::device::low_latency::combine_rdma)
