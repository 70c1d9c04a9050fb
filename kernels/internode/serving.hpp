// Functions that the warps of a call share: they work off the chunks or rows of all nodes, and read the words of rails.
#pragma once

#include "kernels/common/messages.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/internode/params.hpp"
#include "kernels/normal/row_copy.hpp"
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

// A local ring: rows of a call, numbered from 0, pass from one rank of a node to another.
//
//   writer                                     reader
//   acquire: row n - slots has been released
//   stores row n
//   publish: `published` of the slot, there    await: `published` of the slot
//                                              reads row n
//                                              release: `released` of the slot, there
//
// Each slot has its words, so that several warps may write and read rows of one ring at once.

/// One end of a ring. In dispatch a rank has a ring from each rank of its node, in combine one from each such rank for
/// each node whose tokens the rows are of.
struct TokenRing {
  const TransferParams& params;
  std::uint64_t call;  ///< number, from 0
  int peer;            ///< index, in this node, of the rank at the other end
  int here, there;     ///< the ring's number at this end, and at the other

  DEEP_EP_DEVICE const InternodeParams& common() const { return params.common; }
  DEEP_EP_DEVICE const LocalRings& rings() const { return params.local; }
  DEEP_EP_DEVICE AwaitedWord word_here(Wanted wanted, const std::uint64_t* words, std::int32_t n,
                                       std::int32_t through) const {
    return {{common().grid.first_of_node() + peer, wanted, Rings::through(call, through)},
            words + rings().slot_of(here, n)};
  }

  // The writer's end.

  /// The word that must come before row `n` may be stored.
  DEEP_EP_DEVICE AwaitedWord room(std::int32_t n) const {
    return word_here(Wanted::internode_near_room, common().window.released(common().own_heap()), n, n - rings().slots);
  }
  DEEP_EP_DEVICE bool has_room(std::int32_t n) const { return n < rings().slots || room(n).is_reached(); }
  /// By a whole warp. False after a fault.
  DEEP_EP_DEVICE bool acquire(std::int32_t n) const {
    return n < rings().slots || room(n).await<WholeWarp>(params.wait);
  }
  DEEP_EP_DEVICE std::byte* slot_there(std::int32_t n) const {
    return rings().slot(there, n).in(common().heap_of(peer));
  }
  /// By a whole warp, which has stored row `n`.
  DEEP_EP_DEVICE void publish(std::int32_t n) const {
    warp::sync();  // the lanes' stores come before the word
    if (lane_index() != 0) return;
    store_release<Scope::system>(common().window.published(common().heap_of(peer)) + rings().slot_of(there, n),
                                 Rings::through(call, n));
  }

  // The reader's end.

  /// The word that says that row `n` is there.
  DEEP_EP_DEVICE AwaitedWord row(std::int32_t n) const {
    return word_here(Wanted::internode_near_rows, common().window.published(common().own_heap()), n, n);
  }
  DEEP_EP_DEVICE std::byte* slot(std::int32_t n) const { return rings().slot(here, n).in(common().own_heap()); }
  /// By one lane, when the whole warp has read row `n`.
  DEEP_EP_DEVICE void release(std::int32_t n) const {
    store_release<Scope::system>(common().window.released(common().heap_of(peer)) + rings().slot_of(there, n),
                                 Rings::through(call, n));
  }
};

}  // namespace deep_ep::device::internode
