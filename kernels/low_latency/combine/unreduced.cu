// Low-latency combine of calls in two launches: rows travel as the experts left them, so that the send part waits for
// nobody's selections. A kernel of its own, as the one for calls in one launch has no room for its instructions.
//
//   send part     counters, row table, acknowledgements (one load time) -> rows of x (one load time) -> lines to the
//                 owners; all blocks are done -> word to all ranks
//                 Where signals say which rows of x are there, they come before these.
//   receive part  counters, selections (one load time) -> lines, as they are polled -> result; all blocks have read,
//                 everybody has sent (one block waits for that alone) -> acknowledgements
// The last block to finish moves the counters on, and the clerk, which reads them, only reads.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/combine/add.hpp"
#include "kernels/low_latency/combine/push_signalled.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// One part of the call, as params.phase says. Rows travel as bfloat16 or in FP8.
template <bool kFp8>
DEEP_EP_DEVICE void combine_unreduced_body(const LowLatencyCombineParams& params, std::byte* memory) {
  using Adder = CombineAdder<kFp8, false, true>;
  const LowLatencyParams& common = params.common;
  const CombineWire wire{params.hidden, kFp8};
  const int warp = warp_index();
  const bool clerk = warp == block_warps() - 1;
  const bool sending = sends(params.phase);
  const std::size_t stage_bytes = sending ? CombineShared::stage_bytes(wire, params.warps_per_row, true) : 0;
  const bool signalled = sending && params.signals.words != nullptr;
  const CombineShared shared(Carver(memory), block_warps(), stage_bytes, 0, 0,
                             signalled ? params.signals.selections : 0);

  // 1. Loads under way: the first row to push; or the selections of the first token to add, where two blocks share a
  // token if there are so many, and the last block has none.
  const int groups = block_warps() / params.warps_per_row;
  const int group = warp / params.warps_per_row;
  const bool pushes = sending && group < groups;
  SignalledPusher<kFp8> pusher{{params, wire, {params, group, groups}, warp % params.warps_per_row, shared.stage(warp)},
                               shared};
  if (pushes && !signalled) pusher.load_first(clerk);
  if (thread_index() == 0) shared.words->listed = 0;
  const int by_two = 2 * params.num_tokens <= common.working_blocks ? 1 : 0;
  const int first = block_index() < common.working_blocks ? block_index() >> by_two : params.num_tokens;
  LoadedSelection loaded{};
  if (!sending && first < params.num_tokens && lane_index() < params.num_topk) {
    loaded = Selections{params}.load(first, lane_index());
  }

  // 2. Which call is this?
  const LowLatencyEpochs epochs = read_epochs(params, *shared.words, clerk);
  const UnreducedReach reach(common, sending ? epochs.send : epochs.receive, params.row_bytes);

  // 3. Push, or add.
  if (sending) {
    // An earlier call, in one launch, may not have been acknowledged.
    if (clerk && block_index() == 0) reach.acknowledge_all(epochs.receive - 1);
    if (signalled) {
      pusher.list_selections();
      block::sync();
      pusher.push_listed(reach);
    } else if (pushes) {
      pusher.push_all(reach);
    }
  } else {
    const int member = (block_index() & by_two) * block_warps() + warp;
    const Adder adder{params, wire, reach, member, block_warps() << by_two, loaded, first};
    adder.add_all(first, common.working_blocks >> by_two);
    if (block_index() == grid_blocks() - 1 && warp == 0) UnreducedSurvey{params, reach}.await_all_sent();
  }

  // 4. The last block tells the peers: that all rows are there, or that they may send the call after the next.
  if (!last_warp_to_finish(common, epochs, params.phase)) return;
  if (!sending) return reach.acknowledge_all(epochs.receive);
#pragma unroll 1
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarpSize) {
    reach.tell_sent(peer, shared.words->call);
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency_unreduced, deep_ep::device::low_latency::combine_unreduced_body<false>)
DEEP_EP_DEFINE_KERNEL(combine_low_latency_unreduced_fp8, deep_ep::device::low_latency::combine_unreduced_body<true>)
