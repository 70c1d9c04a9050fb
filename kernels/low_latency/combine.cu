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
  constexpr int kBarrier = 15;  // named, as the roles come here by ways of their own
  if (clerk && lane_index() == 0) shared = read_epochs(params.common, LowLatencyKind::combine);
  block::sync(kBarrier, block_threads());
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
  const int adders = params.adding_warps;
  const int groups = (block_warps() - adders) / params.warps_per_row;
  const CombineBlockLayout layout{
      groups,
      {params.stages, wire.bytes(), rows_of_group(params.common.num_ranks, params.max_tokens, groups * grid_blocks())}};
  const int announcers = adders > 0 ? adders : block_warps();
  Epochs& shared = *layout.epochs(memory);
  const bool clerk = warp_index() == announcers - 1;
  std::uint64_t call = 0;

  if (warp_index() < adders) {
    // As owner: tell the expert ranks which of their rows count, and how much; then add up the rows that come.
    const Announcer announcer(params, thread_index(), announcers * kWarpSize);
    const Epochs epochs = find_epochs(params, shared, clerk);
    call = epochs.sent + 1;
    if (sends(params.phase)) announcer.announce(call);
    CombineAdder{params, wire, epochs.received + 1, thread_index(), adders * kWarpSize, layout.sources(memory)}
        .add_all();
  } else {
    // As expert side: push rows. If nobody adds, announce first.
    const int group = (warp_index() - adders) / params.warps_per_row;
    const int warp = (warp_index() - adders) % params.warps_per_row;
    CombineGroup pushing{params, wire, group, groups, warp, layout.group, layout.of_group(memory, group)};
    pushing.push_all([&](std::uint64_t& epoch) {
      if (adders > 0) {
        epoch = find_epochs(params, shared, false).sent + 1;
      } else {
        const Announcer announcer(params, thread_index(), announcers * kWarpSize);
        epoch = find_epochs(params, shared, clerk).sent + 1;
        announcer.announce(epoch);
      }
    });
    call = pushing.epoch;
  }
  if (clerk && block_index() == 0 && params.common.mask != nullptr && sends(params.phase)) {
    watch_peers(params.common, call);
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency, deep_ep::LowLatencyCombineParams,
                      deep_ep::device::low_latency::combine_body<false>, deep_ep::kCombineThreads)
DEEP_EP_DEFINE_KERNEL(combine_low_latency_logfmt, deep_ep::LowLatencyCombineParams,
                      deep_ep::device::low_latency::combine_body<true>, deep_ep::kCombineLogfmtThreads)
