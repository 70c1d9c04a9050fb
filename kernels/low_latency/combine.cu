// Low-latency combine: for each token of this rank, the weighted sum of what the experts made of it.
//
// Each rank sums the rows of its own experts and sends one row a token to the token's owner, which adds up the ranks'
// rows. Send part: owners announce their tokens' selections, expert ranks sum and push. Receive part: owners add.
//
// What waits for what, and so decides how long a call with few tokens takes:
//   owner     counters, selections, acknowledgements (one load time) -> cells to the peers (one trip)
//   expert    row table (one load time) -> rows of x (one load time), meanwhile the cells come
//             -> row to the owner (one trip) -> its completion, then the flag (a trip back and forth)
//   owner     flag -> rows (one load time) -> result
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
DEEP_EP_DEVICE Epochs find_epochs(const LowLatencyCombineParams& params, Epochs& shared, bool clerk) {
  if (clerk && lane_index() == 0) shared = read_epochs(params.common, LowLatencyKind::combine);
  block::sync();
  const Epochs epochs = shared;
  if (!clerk) return epochs;
  if (block_index() == 0) tell_progress(params, epochs);
  if (lane_index() == 0) arrive_at_epoch(params.common, LowLatencyKind::combine, epochs, params.phase);
  warp::sync();
  return epochs;
}

/// Rows travel as bfloat16, or in LogFMT: a kernel of its own, so that its registers are not everybody's.
template <bool kLogfmt>
DEEP_EP_DEVICE void combine_body(const LowLatencyCombineParams& params, std::byte* memory) {
  const CombineWire wire{params.hidden, kLogfmt};
  const int groups = sends(params.phase) ? block_warps() / params.warps_per_row : 0;
  const CombineBlockLayout layout{
      groups,
      {params.stages, wire.bytes(), rows_of_group(params.common.num_ranks, params.max_tokens, groups * grid_blocks())}};
  Epochs& shared = *layout.epochs(memory);
  const bool clerk = warp_index() == block_warps() - 1;

  // 1. As owner, tell the expert ranks which of their rows count, and how much. As expert side, push rows.
  if (groups > 0) {
    const int group = warp_index() / params.warps_per_row;
    CombineGroup pushing{
        params, wire, group, groups, warp_index() % params.warps_per_row, layout.group, layout.of_group(memory, group)};
    pushing.push_all([&](std::uint64_t& epoch) {
      const Announcer announcer(params, thread_index(), block_threads());
      epoch = find_epochs(params, shared, clerk).sent + 1;
      announcer.announce(epoch);
    });
  } else {
    find_epochs(params, shared, clerk);
  }

  // 2. As owner, add up the rows that come.
  if (receives(params.phase)) {
    CombineAdder{params, wire, shared.received + 1, thread_index(), block_threads(), layout.sources(memory)}.add_all();
  }
  if (clerk && block_index() == 0 && params.common.mask != nullptr && sends(params.phase)) {
    watch_peers(params.common, shared.sent + 1);
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency, deep_ep::LowLatencyCombineParams,
                      deep_ep::device::low_latency::combine_body<false>, deep_ep::kCombineThreads)
DEEP_EP_DEFINE_KERNEL(combine_low_latency_logfmt, deep_ep::LowLatencyCombineParams,
                      deep_ep::device::low_latency::combine_body<true>, deep_ep::kCombineLogfmtThreads)
