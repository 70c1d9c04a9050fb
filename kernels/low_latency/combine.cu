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

constexpr int kClerkBarrier = 15;

/// One warp of the block does what is off everybody's way: tells the peers which calls this rank is done with, and when
/// all blocks have read the counters, advances them. `counters` as all warps of the block have read them.
DEEP_EP_DEVICE void keep_books(const LowLatencyCombineParams& params, std::uint64_t sent, std::uint64_t received) {
  const LowLatencyParams& common = params.common;
  LowLatencyCounters& counters = common.state->counters[static_cast<int>(LowLatencyKind::combine)];
  if (block_index() == 0) {
    for (int peer = lane_index(); peer < common.num_ranks; peer += kWarpSize) {
      if (masked(common, peer)) continue;
      Peer{common.heaps[peer]}.signal(common.window.acknowledged_at(LowLatencyKind::combine, common.rank), received);
    }
  }
  block::sync(kClerkBarrier, block_threads());  // every warp of the block has read the counters
  if (lane_index() != 0) return;
  const auto blocks = static_cast<std::uint32_t>(grid_blocks());
  if (fetch_add_acq_rel<Scope::gpu>(&counters.arrived, std::uint32_t{1}) + 1 != blocks) return;
  store_relaxed<Scope::gpu>(&counters.arrived, std::uint32_t{0});
  if (sends(params.phase)) store_relaxed<Scope::gpu>(&counters.sent, sent + 1);
  if (receives(params.phase)) store_relaxed<Scope::gpu>(&counters.received, received + 1);
}

/// Rows travel as bfloat16, or in LogFMT: a kernel of its own, so that its registers are not everybody's.
template <bool kLogfmt>
DEEP_EP_DEVICE void combine_body(const LowLatencyCombineParams& params, std::byte* memory) {
  // 1. Which call is this?
  const LowLatencyCounters& counters = params.common.state->counters[static_cast<int>(LowLatencyKind::combine)];
  const auto sent = load_relaxed<Scope::gpu>(&counters.sent);
  const auto received = load_relaxed<Scope::gpu>(&counters.received);
  const int adders = params.adding_warps;
  if (warp_index() == (adders > 0 ? adders : block_warps()) - 1) {
    keep_books(params, sent, received);
  } else {
    block::arrive(kClerkBarrier, block_threads());
  }
  warp::sync();

  // 2. As owner: tell the expert ranks which of their rows count, and how much.
  if (sends(params.phase)) announce_selections(params, sent + 1);

  // 3. As owner, add up the rows that come; as expert rank, push rows.
  const CombineWire wire{params.hidden, kLogfmt};
  const int groups = (block_warps() - adders) / params.warps_per_row;
  const CombineBlockLayout layout{groups, params.stages, wire.bytes()};
  if (warp_index() < adders) {
    CombineAdder{params, wire, received + 1, thread_index(), adders * kWarpSize, layout.sources(memory)}.add_all();
  } else {
    const int group = (warp_index() - adders) / params.warps_per_row;
    const int warp = (warp_index() - adders) % params.warps_per_row;
    CombineGroup{params,
                 wire,
                 sent + 1,
                 group,
                 groups,
                 warp,
                 *layout.choice(memory, group),
                 layout.first_stage(memory, group),
                 layout.aligned_stage_bytes()}
        .push_all();
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency, deep_ep::LowLatencyCombineParams,
                      deep_ep::device::low_latency::combine_body<false>, deep_ep::kCombineThreads)
DEEP_EP_DEFINE_KERNEL(combine_low_latency_logfmt, deep_ep::LowLatencyCombineParams,
                      deep_ep::device::low_latency::combine_body<true>, deep_ep::kCombineLogfmtThreads)
