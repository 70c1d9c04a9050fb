// Functions that the warps of a call share: they work off the chunks or rows of all nodes, and read the words of rails.
#pragma once

#include "kernels/common/progress.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/internode/params.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::internode {

/// A word in this rank's heap that it waits for, and that another rank raises.
struct AwaitedWord {
  Awaited awaited{0, Wanted::nothing, 0};
  const std::uint64_t* word = nullptr;

  DEEP_EP_DEVICE bool is_reached() const { return load_acquire<Scope::system>(word) >= awaited.expected; }
  template <class Group = OneThread>
  DEEP_EP_DEVICE bool await(const WaitContext& wait) const {
    return wait_signal<Group>(wait, word, awaited);
  }
};

/// By a whole warp, which has its share of every node's parts and takes any that it can work on: to wait for one node
/// would hold up the others, and in a circle of nodes all of them. False after a fault.
///   next                    a word for each node (or whatever else has parts), of the warp
///   first, step             the warp works on parts first, first + step and so on of each, in their order
///   parts(number)           how many there are
///   ready(number)           may the next one be worked on? Acquires it
///   work(number, part)      false after a fault
///   missing(number, part)   the AwaitedWord that the part waits for, which is put on record if it is late. Without a
///                           word if another warp of this rank waits for it, and puts it on record
template <class Parts, class Ready, class Work, class Missing>
DEEP_EP_DEVICE bool serve(int others, const WaitContext& wait, std::int32_t* next, int first, int step, Parts parts,
                          Ready ready, Work work, Missing missing) {
  const ReportLate policy{wait};
  // A lane looks after the nodes of its index and multiples of 32 behind.
  for (int number = lane_index(); number < others; number += kWarpSize) next[number] = first;
  int group = 0;  // of 32 nodes
  int turn = 0;   // where in it the warp looks first: no node is served twice in a row while others wait
  for (;;) {
    std::uint32_t found = 0;
    bool left = true;
    const auto some = [&](Poll&) {
      left = false;
      for (int groups = 0; groups < others; groups += kWarpSize) {
        group = group + kWarpSize < others ? group + kWarpSize : 0;
        const int number = group + lane_index();
        const bool wants = number < others && next[number] < parts(number);
        found = warp::ballot(wants && ready(number));
        left = warp::any(wants) || left;
        if (found != 0) return true;
      }
      return !left;
    };
    const auto gives_up = [&](const Poll& poll) {
      // A warp that left without a record would leave the others waiting.
      const bool over = warp::any(policy.called_off({}));
      if (over) return true;
      if (!warp::any(may_be_late(poll.begin))) return false;
      bool reported = false;
      for (int number = lane_index(); number < others; number += kWarpSize) {
        if (next[number] >= parts(number)) continue;
        const AwaitedWord part = missing(number, next[number]);
        if (part.word == nullptr || !policy.is_late(part.awaited, poll.begin)) continue;
        policy.blame(part.awaited, load_relaxed<Scope::system>(part.word));
        reported = true;
      }
      return warp::any(reported);
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

/// The word in which the rail of other node `number` says how much of a lane has been delivered.
DEEP_EP_DEVICE const std::uint64_t* tail_of(const TransferParams& params, int number, int lane) {
  return params.common.window.rail_word(InternodeWindow::tail, params.common.grid.other(number), lane)
      .in(params.common.own_heap());
}
/// The word that says that a chunk from other node `number` has landed.
DEEP_EP_DEVICE AwaitedWord landed_through(const TransferParams& params, std::uint64_t call, int number, int chunk) {
  const Rings& rings = params.rings;
  const int rail = params.common.grid.rail_in(params.common.grid.other(number));
  return {{rail, Wanted::internode_rows, Rings::through(call, rings.in_lane(chunk))},
          tail_of(params, number, rings.lane_of(chunk))};
}
/// May a chunk be staged for other node `number`?
DEEP_EP_DEVICE bool is_stageable(const TransferParams& params, std::uint64_t call, int number, int chunk) {
  const Rings& rings = params.rings;
  const int at = rings.in_lane(chunk);
  const RailState& rail = params.common.rails[rings.lane_of(chunk) * params.common.grid.others() + number];
  return at < rings.held() || load_acquire<Scope::gpu>(&rail.sent) >= rings.room_for(call, at);
}
/// Rows that cross the network between this rank and the nodes before other node `number`, by nodes: where those of
/// that node begin in relay_rows.
DEEP_EP_DEVICE std::int64_t rows_before(const NodeGrid& grid, const std::int32_t* rows_of_node, int number) {
  std::int64_t before = 0;
  for (int node = 0; node < grid.other(number); ++node) {
    if (node != grid.node()) before += rows_of_node[node];
  }
  return before;
}

/// The word that the ends of a rail compare, for one direction of a call: the same at both, unless the ranks disagree.
/// It is a progress word whose position stands for the rows.
DEEP_EP_DEVICE std::uint64_t rail_shape(const TransferParams& params, std::uint64_t call, int rows_to_rail,
                                        int rows_from_rail) {
  const std::uint32_t rows = combine_shapes(params.shape, static_cast<std::uint32_t>(rows_to_rail));
  return Progress::at(call + 1, combine_shapes(rows, static_cast<std::uint32_t>(rows_from_rail)));
}
/// The word that the rail in other node `number` sends by each lane ahead of its rows, and the value that it must have.
DEEP_EP_DEVICE const std::uint64_t* shape_of(const TransferParams& params, int number, int lane) {
  return params.common.window.rail_word(InternodeWindow::shape, params.common.grid.other(number), lane)
      .in(params.common.own_heap());
}
DEEP_EP_DEVICE std::uint64_t expected_shape(const TransferParams& params, std::uint64_t call, int number) {
  const int node = params.common.grid.other(number);
  return rail_shape(params, call, params.counts.from_node[node], params.counts.to_node[node]);
}
/// Does the rail mean the same call? Asked when its word has come. A word of a later call agrees: a rail that has ended
/// this call has compared, too.
DEEP_EP_DEVICE bool shapes_agree(std::uint64_t expected, std::uint64_t theirs) {
  return Progress::call_of(theirs) != Progress::call_of(expected) || theirs == expected;
}
/// Signals to the ranks of this node that this rank has ended the call, and waits for the same signal: their rows are
/// here, and ours are read. By the threads of one block, when all blocks have done their work.
DEEP_EP_DEVICE void end_together(const TransferParams& params, std::uint64_t epoch) {
  const InternodeParams& common = params.common;
  if (aborted(params.wait)) return;  // a block has failed: no rank may take its rows for stored
  for (int index = thread_index(); index < common.grid.width; index += block_threads()) {
    store_release<Scope::system>(common.window.done(common.heap_of(index), common.grid.index()), epoch);
  }
  for (int index = thread_index(); index < common.grid.width; index += block_threads()) {
    wait_signal(params.wait, common.window.done(common.own_heap(), index),
                {common.grid.first_of_node() + index, Wanted::internode_done, epoch});
  }
  if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->next_token, std::uint32_t{0});
  for (int index = thread_index(); index < common.grid.width; index += block_threads()) {
    store_relaxed<Scope::gpu>(common.local_tickets + index, std::uint32_t{0});
  }
}

}  // namespace deep_ep::device::internode
