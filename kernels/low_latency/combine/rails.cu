// Low-latency combine by rails, of calls in two launches: the node's sums for owners of other nodes are made by a third
// one beside the caller's (relay.cu). A kernel of its own, as the one for calls in one launch has no room for a choice.
//
//   send part     counters, selections, row table -> selections to all ranks, the number of the call to the own relay;
//                 rows to near owners, and to those who add up for far ones
//   relay         rows of this node -> sums -> far owners
//   receive part  rows of this node, sums of the others -> result
//
// The send part waits for room at all ranks, and for their selections. These are told by send parts; room is told by
// send parts, too, the next of the same kind at the latest, and by receive parts before they wait. So it waits for
// nobody's hook.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/combine/add.hpp"
#include "kernels/low_latency/combine/epochs.hpp"
#include "kernels/low_latency/combine/post.hpp"
#include "kernels/low_latency/combine/push.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// By one thread: tells the relay of which call this is the send part.
DEEP_EP_DEVICE void tell_relay(LowLatencySums& sums, std::uint64_t epoch, std::uint32_t call) {
  store_relaxed<Scope::gpu>(&sums.call[epoch & 1], std::uint64_t{call});
  store_relaxed<Scope::gpu>(&sums.sent[epoch & 1], epoch);
}

/// One part of the call, as params.phase says.
DEEP_EP_DEVICE void combine_rails_body(const LowLatencyCombineParams& params, std::byte* memory) {
  using Adder = CombineAdder<false, true>;
  using Reach = typename Adder::Reach;
  const LowLatencyParams& common = params.common;
  const CombineWire wire{.hidden = params.hidden, .fp8 = false};
  const int warp = warp_index();
  const bool sending = sends(params.phase);
  const int groups = sending ? block_warps() / params.warps_per_row : 0;
  const int group = warp / params.warps_per_row;
  const bool pushes = group < groups;
  const CombineShared shared(Carver(memory), wire, params.block_warps, groups, params.warps_per_row,
                             params.rows_of_group, 0);
  const Reach no_call(common, 0, params.row_bytes);
  if (no_call.posts()) return post_combine<Reach, true>(params, wire, shared);

  // 1. Loads under way.
  CombinePusher<false, Reach> pusher{params,
                                     wire,
                                     group,
                                     groups,
                                     warp % params.warps_per_row,
                                     shared.words->call,
                                     shared.deferred(warp),
                                     shared.stage(warp)};
  if (pushes) pusher.load_first();
  const Announcer<Reach> announcer(params, no_call, sending);

  // 2. Which call is this?
  const bool clerk = warp == block_warps() - 1;
  const LowLatencyEpochs epochs = find_epochs<Reach>(params, *shared.words, clerk);

  // 3. Receive part: add up the rows of the own tokens.
  if (!sending) {
    const Adder adder{params, wire, Reach(common, epochs.receive, params.row_bytes), warp, params.block_warps};
    adder.add_tokens({common.rank, params.num_tokens, false}, block_index(), common.working_blocks);
    return;
  }

  // 4. Send part: tell the relay, tell the selections, push rows.
  if (clerk && block_index() == 0 && lane_index() == 0) {
    tell_relay(common.state->sums, epochs.send, shared.words->call);
  }
  const Reach reach(common, epochs.send, params.row_bytes);
  announcer.announce(reach, shared.words->call);
  if (pushes) pusher.push_all(reach);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency_rails, deep_ep::device::low_latency::combine_rails_body)
