// Low-latency combine: for each token of this rank, the weighted sum of what the experts made of it.
//
// Each rank sums the rows of its own experts and sends one row a token to the token's owner, which adds up the ranks'
// rows. Send part: owners announce their tokens' selections, expert ranks sum and push. Receive part: owners add.
//
// What waits for what, and so decides how long a call with few tokens takes:
//   owner     counters, selections, acknowledgements (one load time) -> cells to the peers (one trip)
//   expert    row table (one load time) -> rows of x (one load time), meanwhile the cells come -> lines to the owner
//             (one trip)
//   owner     lines, as they are polled -> result
// There is no barrier of the grid, nor does one rank wait for another but for these.
#include "kernels/low_latency/combine_add.hpp"
#include "kernels/low_latency/combine_push.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// Tells the peers, by lane, which call this rank is done with and which it begins.
DEEP_EP_DEVICE void tell_progress(const LowLatencyCombineParams& params, const Epochs& epochs) {
  const LowLatencyParams& common = params.common;
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarpSize) {
    if (masked(common, peer)) continue;
    acknowledge(common, LowLatencyKind::combine, peer, epochs.received);
    if (common.mask == nullptr || !sends(params.phase)) continue;
    Peer{common.heaps[peer]}.signal(common.window.begun_at(LowLatencyKind::combine, common.rank), epochs.sent + 1);
  }
}

/// By one warp, where ranks are masked: all that will come have begun the call.
DEEP_EP_DEVICE void watch_peers(const LowLatencyParams& common, std::uint64_t epoch) {
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarpSize) {
    if (masked(common, peer)) continue;
    const auto* begun =
        reinterpret_cast<const std::uint64_t*>(common.local + common.window.begun_at(LowLatencyKind::combine, peer));
    await_word(common, begun, epoch, epoch, peer, Wanted::low_latency_combine_selection);
  }
}

/// Which call is this? Every thread of the block comes here. One warp reads the counters for all, and afterwards does
/// what is off everybody's way: it tells the peers which call this rank is done with, and moves the counters on.
DEEP_EP_DEVICE Epochs find_epochs(const LowLatencyCombineParams& params, CombineBlockLayout::Words& shared,
                                  bool clerk) {
  constexpr int kBarrier = 15;  // named, as the roles come here by ways of their own
  if (clerk && lane_index() == 0) {
    shared.epochs = read_epochs(params.common, LowLatencyKind::combine);
    note_masks(params.common, shared.masks);
  }
  block::sync(kBarrier, block_threads());
  const Epochs epochs = shared.epochs;
  if (!clerk) return epochs;
  if (block_index() == 0) tell_progress(params, epochs);
  if (lane_index() == 0) arrive_at_epoch(params.common, LowLatencyKind::combine, epochs, params.phase);
  warp::sync();
  return epochs;
}

/// Rows travel as bfloat16, or in LogFMT: a kernel of its own, so that its registers are not everybody's.
template <bool kLogfmt>
DEEP_EP_DEVICE void combine_body(const LowLatencyCombineParams& params, std::byte* memory) {
  const LowLatencyParams& common = params.common;
  const CombineWire wire{params.hidden, kLogfmt};
  const int adders = params.adding_warps;
  const int pushers = block_warps() - adders;
  const int groups = pushers / params.warps_per_row;
  const CombineBlockLayout layout{pushers, adders,
                                  rows_of_group(common.num_ranks, params.max_tokens, groups * grid_blocks()), kLogfmt};
  const int announcers = adders > 0 ? adders : block_warps();
  CombineBlockLayout::Words& shared = layout.words(memory);
  const bool clerk = warp_index() == announcers - 1;
  std::byte* stage = kLogfmt ? layout.stage(memory, warp_index()) : nullptr;
  Epochs epochs;

  if (warp_index() < adders) {
    // As owner: tell the expert ranks which of their rows count, and how much; then add up the rows that come.
    const Announcer announcer(params, thread_index(), announcers * kWarpSize);
    epochs = find_epochs(params, shared, clerk);
    if (sends(params.phase)) announcer.announce(epochs.sent + 1);
    const CombineAdder<kLogfmt> adder{params, wire, epochs.received + 1, warp_index(), adders, stage};
    adder.add_all(block_index(), grid_blocks());
  } else {
    // As expert side: push rows. If nobody adds, announce first.
    const int warp = warp_index() - adders;
    CombinePusher<kLogfmt> pusher{
        params, wire, warp / params.warps_per_row, groups, warp % params.warps_per_row, layout.put_off(memory, warp),
        stage};
    pusher.push_all([&](std::uint64_t& epoch) {
      if (adders > 0) {
        epochs = find_epochs(params, shared, false);
      } else {
        const Announcer announcer(params, thread_index(), announcers * kWarpSize);
        epochs = find_epochs(params, shared, clerk);
        announcer.announce(epochs.sent + 1);
      }
      epoch = epochs.sent + 1;
    });
  }
  if (common.mask == nullptr) return;

  // Where ranks are masked: who has not begun is found out, and the tokens are added with the same ranks throughout.
  if (clerk && block_index() == 0 && sends(params.phase)) watch_peers(common, epochs.sent + 1);
  if (adders == 0) return;
  finish_with_masks(common, counters_of(common, LowLatencyKind::combine), shared.masks);
  if (shared.masks.again == 0 || warp_index() >= adders) return;
  const CombineAdder<kLogfmt> adder{params, wire, epochs.received + 1, warp_index(), adders, stage};
  adder.add_all(0, 1);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency, deep_ep::LowLatencyCombineParams,
                      deep_ep::device::low_latency::combine_body<false>, deep_ep::kCombineThreads)
DEEP_EP_DEFINE_KERNEL(combine_low_latency_logfmt, deep_ep::LowLatencyCombineParams,
                      deep_ep::device::low_latency::combine_body<true>, deep_ep::kCombineLogfmtThreads)
