// Warps that work off chunks or rows of all nodes. Each has its share of every node's, and takes whichever it can work
// on: to wait for one node would hold up the others, and in a circle of nodes all of them.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/internode/params.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::internode {

/// By a whole warp. `next`: a word for each node (or whatever else has parts), of the warp. The warp works on parts
/// `first`, `first + step` and so on of each, in their order. `parts(number)`: how many there are. `ready(number)`: how
/// many may be worked on so far, acquiring what they are. `work(number, part)`: false after a fault.
/// `report_late(number, part, is_late)`: puts on record what is missing if is_late(the rank that it comes from, what it
/// is): the warp has waited as long as `wait` allows, or the rank is lost. False if others of this rank will, for whom
/// the warp goes on waiting. False after a fault.
template <class Parts, class Ready, class Work, class Late>
DEEP_EP_DEVICE bool serve(int others, const WaitContext& wait, std::int32_t* next, int first, int step, Parts parts,
                          Ready ready, Work work, Late report_late) {
  const ReportLate policy{wait};
  // A lane looks after the nodes of its index and multiples of 32 behind.
  for (int number = lane_index(); number < others; number += kWarpSize) next[number] = first;
  int group = 0;  // of 32 nodes
  int turn = 0;   // where in it the warp looks first: nobody is served twice in a row where others wait
  for (;;) {
    std::uint32_t found = 0;
    bool left = true;
    const auto some = [&](Poll&) {
      left = false;
      for (int groups = 0; groups < others; groups += kWarpSize) {
        group = group + kWarpSize < others ? group + kWarpSize : 0;
        const int number = group + lane_index();
        const bool wants = number < others && next[number] < parts(number);
        found = warp::ballot(wants && next[number] < ready(number));
        left = warp::any(wants) || left;
        if (found != 0) return true;
      }
      return !left;
    };
    const auto gives_up = [&](const Poll& poll) {
      // A warp that left without a record would leave the others waiting.
      const bool over = warp::any(policy.called_off({}));
      if (!over && !warp::any(policy.time_is_over(poll.begin) || is_heard(wait, poll.begin))) return false;
      const auto is_late = [&](int peer, Wanted wanted) { return policy.is_late({peer, wanted, 0}, poll.begin); };
      bool reported = false;
      for (int number = lane_index(); !over && number < others; number += kWarpSize) {
        if (next[number] < parts(number)) reported = report_late(number, next[number], is_late) || reported;
      }
      return over || warp::any(reported);
    };
    if (!poll_until(some, gives_up)) return false;
    if (found == 0) return true;
    const std::uint32_t behind = found & ~((1u << turn) - 1);
    const int lane = lowest_bit(behind != 0 ? behind : found);
    turn = (lane + 1) % kWarpSize;
    const int number = group + lane;
    warp::sync();  // what the lane acquired, the others may use
    const std::int32_t part = warp::shuffle(lane == lane_index() ? next[number] : 0, lane);
    if (lane == lane_index()) next[number] += step;
    if (!work(number, part)) return false;
  }
}

// Kernels for one lane to a rail know that there is one (kLanes is false).

/// The lane that a chunk goes by, its number among those of the lane, and how many of these a ring holds.
template <bool kLanes>
DEEP_EP_DEVICE int lane_of(const Rings& rings, int chunk) {
  return kLanes ? rings.lane_of(chunk) : 0;
}
template <bool kLanes>
DEEP_EP_DEVICE int in_lane(const Rings& rings, int chunk) {
  return kLanes ? rings.in_lane(chunk) : chunk;
}
template <bool kLanes>
DEEP_EP_DEVICE int chunks_of_lane(const Rings& rings) {
  return kLanes ? rings.in_lane(rings.chunks) : int{rings.chunks};
}

/// The word in which the rail of other node `number` says how much of a lane has been delivered.
DEEP_EP_DEVICE const std::uint64_t* tail_of(const TransferParams& params, int number, int lane) {
  return params.common.window.rail_word(InternodeWindow::tail, params.common.grid.other(number), lane)
      .in(params.common.own_heap());
}
/// Chunks of a lane in this call that have landed.
DEEP_EP_DEVICE int landed_chunks(const TransferParams& params, std::uint64_t call, int number, int lane) {
  return Rings::chunks_of_call(call, load_acquire<Scope::system>(tail_of(params, number, lane)));
}
/// What the ends of a rail tell each other of a call, for one direction: the same at both, unless the ranks disagree.
DEEP_EP_DEVICE std::uint64_t rail_shape(const TransferParams& params, std::uint64_t call, int rows_to_rail,
                                        int rows_from_rail) {
  const std::uint32_t rows = combine_shapes(params.shape, static_cast<std::uint32_t>(rows_to_rail));
  return (call + 1) << 32 | combine_shapes(rows, static_cast<std::uint32_t>(rows_from_rail));
}
/// The word in which other node `number`'s rail says it, by each lane ahead of its rows, and what it must say.
DEEP_EP_DEVICE const std::uint64_t* shape_of(const TransferParams& params, int number, int lane) {
  return params.common.window.rail_word(InternodeWindow::shape, params.common.grid.other(number), lane)
      .in(params.common.own_heap());
}
DEEP_EP_DEVICE std::uint64_t expected_shape(const TransferParams& params, std::uint64_t call, int number) {
  const int node = params.common.grid.other(number);
  return rail_shape(params, call, params.counts.from_node[node], params.counts.to_node[node]);
}
/// Does the rail mean what we mean? Once it has said so; if it has ended the call and begun the next, it has found the
/// same.
DEEP_EP_DEVICE bool shapes_agree(std::uint64_t expected, std::uint64_t theirs) {
  return theirs >> 32 != expected >> 32 || theirs == expected;
}
/// Chunks of a lane in this call that may be staged.
template <bool kLanes>
DEEP_EP_DEVICE int stageable_chunks(const TransferParams& params, std::uint64_t call, int number, int lane) {
  const int state = kLanes ? lane * params.common.grid.others() + number : number;
  const std::uint64_t sent = load_acquire<Scope::gpu>(&params.common.rails[state].sent);
  return chunks_of_lane<kLanes>(params.rings) + Rings::chunks_of_call(call, sent);
}
template <bool kLanes>
DEEP_EP_DEVICE bool is_stageable(const TransferParams& params, std::uint64_t call, int number, int chunk) {
  return in_lane<kLanes>(params.rings, chunk) <
         stageable_chunks<kLanes>(params, call, number, lane_of<kLanes>(params.rings, chunk));
}

/// Tells the ranks of this node that this rank has ended the call, and waits for the same word: their rows are here,
/// and ours are read. By the threads of one block, when all blocks have done their work.
DEEP_EP_DEVICE void end_together(const TransferParams& params, std::uint64_t epoch) {
  const InternodeParams& common = params.common;
  if (aborted(params.wait)) return;  // a block has failed: nobody may take its rows for stored
  for (int index = thread_index(); index < common.grid.width; index += block_threads()) {
    store_release<Scope::system>(common.window.done(common.heap_of(index), common.grid.index()), epoch);
  }
  for (int index = thread_index(); index < common.grid.width; index += block_threads()) {
    wait_signal(params.wait, common.window.done(common.own_heap(), index),
                {common.grid.first_of_node() + index, Wanted::internode_done, epoch});
  }
  if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->next_token, std::uint32_t{0});
  for (int index = thread_index(); index < common.grid.width; index += block_threads()) {
    store_relaxed<Scope::gpu>(common.near_tickets + index, std::uint32_t{0});
  }
}

}  // namespace deep_ep::device::internode
