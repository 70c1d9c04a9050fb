// Low-latency combine of calls in two launches: rows travel as the experts left them, so that the send part waits for
// nobody's selections. A kernel of its own, as the one for calls in one launch has no room for its instructions.
//
//   send part     counters, row table, acknowledgements (one load time) -> rows of x (one load time) -> lines to the
//                 owners; all blocks are done -> word to all ranks
//   receive part  counters, selections (one load time) -> lines, as they are polled -> result; all blocks have read,
//                 everybody has sent (one block waits for that alone) -> acknowledgements
// The last block to finish moves the counters on, and the clerk, which reads them, only reads.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/combine/add_unreduced.hpp"
#include "kernels/low_latency/combine/push_unreduced.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// Which call is this? One warp, the clerk, reads the counters for all. Unlike find_epochs, it does not move them on.
DEEP_EP_DEVICE LowLatencyEpochs read_epochs(const LowLatencyCombineParams& params, CombineShared::Words& shared,
                                            bool clerk) {
  if (clerk && lane_index() == 0) {
    const std::uint32_t call = sends(params.phase) ? call_of(params) : 0;
    shared.epochs = params.common.counters(LowLatencyKind::combine).epochs();
    shared.call = call;
  }
  block::sync();
  return shared.epochs;
}

/// One part of the call, as params.phase says. Rows travel as bfloat16 or in FP8.
template <bool kFp8>
DEEP_EP_DEVICE void combine_unreduced_body(const LowLatencyCombineParams& params, std::byte* memory) {
  using Reach = UnreducedReach;
  const LowLatencyParams& common = params.common;
  const CombineWire wire{params.hidden, kFp8};
  const int warp = warp_index();
  const bool clerk = warp == block_warps() - 1;
  const UnreducedShared shared(Carver(memory), wire, block_warps());
  CombineShared::Words& words = *shared.words;

  const bool sending = sends(params.phase);
  const int groups = block_warps() / params.warps_per_row;
  const int group = warp / params.warps_per_row;
  const bool pushes = sending && group < groups;
  UnreducedPusher<kFp8> pusher{
      params, wire, {params, group, groups}, warp % params.warps_per_row, kFp8 ? shared.stage(warp) : nullptr};
  UnreducedAdder<kFp8> adder(params, wire);
  if (pushes) pusher.load_first(clerk);
  if (!sending) adder.load_first();
  const LowLatencyEpochs epochs = read_epochs(params, words, clerk);
  const Reach reach(common, sending ? epochs.send : epochs.receive, params.row_bytes);

  if (sending) {
    // An earlier call, in one launch, may not have been acknowledged.
    for (int peer = lane_index(); clerk && block_index() == 0 && peer < common.num_ranks; peer += kWarpSize) {
      reach.acknowledge(peer, epochs.receive - 1);
    }
    if (pushes) pusher.push_all(reach);
    tell_all_sent(reach, epochs, words.call);
    return;
  }
  adder.add_all(reach);
  if (block_index() == grid_blocks() - 1 && warp == 0) adder.await_all_sent(reach);
  tell_all_received(reach, epochs);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency_unreduced, deep_ep::device::low_latency::combine_unreduced_body<false>)
DEEP_EP_DEFINE_KERNEL(combine_low_latency_unreduced_fp8, deep_ep::device::low_latency::combine_unreduced_body<true>)
