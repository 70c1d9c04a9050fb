// By rails, for combines with hooks: adds up what the ranks of this node have made of the tokens of far owners, and
// posts the sums. A call in one launch does that by itself. With a hook the owners' nodes would wait for whatever this
// rank likes to do before it calls that; so the send part is followed by this kernel, on a stream of its own, and the
// receive part comes after it.
//
//   main stream    send part ----- anything ----- receive part
//                       \                        /
//   own stream           ---- this kernel -------
//
// What it waits for: the selections of its rails in other nodes, and rows of its own node. Send parts tell and push
// these, and these wait for send parts alone (combine.cu); so nobody's hook holds it up. Nor does anything that runs on
// this rank meanwhile, as long as it finds a multiprocessor: kernels that wait for other ranks leave some
// (room_for_relay in csrc/buffer/low_latency/plan_parts.hpp).
//
// It needs no room at the owners, and no completions before it stages a sum where that of the call before the last lay:
// an owner that has announced its selections has received that call, for which it needed all sums that were posted for
// it. So these had left. Its places in this rank's own window are given back by the receive part behind it.
//
// Its queue pairs are its own, as the send part of the next call may be posting. The word at the owner that says how
// far rows have come is added to by both, though in turn: the send part adds what makes it (call, 0), this kernel the
// places of rows. Whoever waits for (call, place) finds a smaller number until both have come, in either order: the
// places of two calls together are less than the step from this call to the one before the last.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/combine/add.hpp"
#include "kernels/low_latency/combine/post.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

// Every warp that adds has a word that says so.
static_assert(kernels::relay_low_latency_sums::kMaxThreads / 32 <=
              static_cast<int>(LowLatencyStaging::kMostWarpsPerRow));

struct SumReach : CombineReach<true, true> {
  using CombineReach::CombineReach;
  DEEP_EP_DEVICE static int channel(const LowLatencyParams& common, int lane) {
    return channel_of_sums(common.lanes, lane);
  }
};

/// A warp of the kernel: the first ones of each block add, the others post.
struct SumRelay {
  const LowLatencyCombineParams& params;
  CombineWire wire;
  SumReach reach;

  /// Owners that this rank adds up for.
  DEEP_EP_DEVICE int owners() const { return reach.turns() - 1; }

  /// By warp `warp` of those that add in a block: its lines of every sum of the block.
  DEEP_EP_DEVICE void add(int warp) const {
    const CombineAdder<false, true> adder{params, wire, reach, warp, params.block_warps};
#pragma unroll 1
    for (int turn = 0; turn < owners(); ++turn) {
      const int owner = reach.owner_of_turn(turn);
      if (!adder.add_tokens(adder.tokens_of(owner), block_index(), grid_blocks())) return;
    }
  }

  /// By warp `warp` of the `warps` that post in a block: one lane to one owner after the other.
  DEEP_EP_DEVICE void post(int warp, int warps, rdma::PosterWords& words) const {
    const int lanes = owners() * params.common.lanes;
#pragma unroll 1
    for (int i = block_index() * warps + warp; i < lanes; i += grid_blocks() * warps) {
      const int owner = reach.owner_of_turn(i % owners());
      CallPoster<SumReach> poster(reach, {owner, i / owners()}, words);
      const CombinePoster<SumReach> sums{params, wire, reach, poster};
      const FarSelections announced{params, reach.far_selections(owner)};
      if (sums.post_sums(announced, announced.await_count(reach, owner), params.block_warps)) {
        poster.tell_rest([&](int place) { return poster.progress(place); });
      }
      poster.await_earlier();
      poster.close();
      warp::sync();  // the words have been read
    }
  }
};

DEEP_EP_DEVICE void relay_sums_body(const LowLatencyCombineParams& params, std::byte* memory) {
  const LowLatencyParams& common = params.common;
  LowLatencyRelay& calls = common.relay(LowLatencyKind::combine);
  const int adders = params.block_warps;
  const CombineShared shared(Carver(memory), 0, 0, 0, block_warps() - adders);
  LowLatencyEpochs& epochs = shared.words->epochs;

  // 1. Which call is this?
  if (thread_index() == 0) epochs.send = calls.find(common.counters(LowLatencyKind::combine));
  block::sync();
  const std::uint64_t epoch = epochs.send;
  const SumRelay relay{params, {params.hidden, false}, SumReach(common, epoch, params.row_bytes)};

  // 2. Add up, and post what has been added up.
  const int posting = warp_index() - adders;
  if (epoch != 0 && posting < 0) relay.add(warp_index());
  if (epoch != 0 && posting >= 0) relay.post(posting, block_warps() - adders, shared.posters[posting]);

  // 3. The last block says that the call is done with.
  block::sync();
  if (thread_index() == 0) calls.end(epoch);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(relay_low_latency_sums, deep_ep::device::low_latency::relay_sums_body)
