// What dispatch and combine share: waits for words of other ranks, warps that work off the chunks or rows of all nodes,
// rings between ranks of a node, and the end of a call.
#pragma once

#include "kernels/common/messages.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/normal/params.hpp"
#include "kernels/normal/row_copy.hpp"
#include "kernels/primitives/bits.hpp"

namespace deep_ep::device::normal {

/// A word in this rank's heap that it waits for, and that another rank raises.
struct AwaitedWord {
  Awaited awaited{0, Wanted::nothing, 0};
  const std::uint64_t* word = nullptr;

  DEEP_EP_DEVICE bool is_reached() const { return load_acquire<Scope::system>(word) >= awaited.expected; }
  template <class Group = OneThread, class Policy>
  DEEP_EP_DEVICE bool await(const Policy& policy) const {
    return wait_signal<Group>(policy, word, awaited);
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
///   idle()                  nothing is ready; also before it ends
template <class Policy, class Parts, class Ready, class Work, class Missing, class Idle>
DEEP_EP_DEVICE bool serve(int others, const Policy& policy, std::int32_t* next, int first, int step, Parts parts,
                          Ready ready, Work work, Missing missing, Idle idle) {
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
      idle();
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
        if (part.word == nullptr) continue;
        reported = policy.ends(part.awaited, poll.begin, load_relaxed<Scope::system>(part.word)) || reported;
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
  std::uint64_t epoch;
  int peer;           ///< the rank at the other end
  int here, there;    ///< the ring's number at this end, and at the other
  std::int32_t rows;  ///< the reader's end: how many come in the call, or more

  DEEP_EP_DEVICE const LocalRings& rings() const { return params.local; }
  /// How far a slot has come with row `n`.
  DEEP_EP_DEVICE std::uint64_t through(std::int32_t n) const {
    return Progress::at(epoch, static_cast<std::uint32_t>(n) + 1);
  }

  // The writer's end.

  /// The word that must come before row `n` may be stored, if it is not one of the first.
  DEEP_EP_DEVICE AwaitedWord room(std::int32_t n) const {
    return {{peer, rings().room, through(n - rings().slots)},
            rings().released.in(params.common.own_heap()) + rings().slot_of(here, n)};
  }
  DEEP_EP_DEVICE bool has_room(std::int32_t n) const { return n < rings().slots || room(n).is_reached(); }
  /// By a whole warp. False after a fault.
  DEEP_EP_DEVICE bool acquire(std::int32_t n) const {
    return n < rings().slots || room(n).await<WholeWarp>(ReportLate{params.wait});
  }
  DEEP_EP_DEVICE std::byte* slot_there(std::int32_t n) const {
    return rings().slot(there, n).in(params.common.heaps[peer]);
  }
  /// The word that becomes through(n) once row `n` is stored.
  DEEP_EP_DEVICE std::uint64_t* published_there(std::int32_t n) const {
    return rings().published.in(params.common.heaps[peer]) + rings().slot_of(there, n);
  }
  /// By a whole warp, which has stored row `n`.
  DEEP_EP_DEVICE void publish(std::int32_t n) const {
    warp::sync();  // the lanes' stores come before the word
    if (lane_index() == 0) store_release<Scope::system>(published_there(n), through(n));
  }

  // The reader's end.

  /// The word that says that row `n` is there.
  DEEP_EP_DEVICE AwaitedWord row(std::int32_t n) const {
    return {{peer, rings().row, through(n)}, rings().published.in(params.common.own_heap()) + rings().slot_of(here, n)};
  }
  DEEP_EP_DEVICE std::byte* slot(std::int32_t n) const { return rings().slot(here, n).in(params.common.own_heap()); }
  /// By one lane, when the whole warp has read row `n`. No row waits for the room of one of the last.
  DEEP_EP_DEVICE void release(std::int32_t n) const {
    if (rows - n <= rings().slots) return;
    store_release<Scope::system>(rings().released.in(params.common.heaps[peer]) + rings().slot_of(there, n),
                                 through(n));
  }
};

/// Signals to the ranks of this node that this rank has ended the call, and waits for the same signal, `wanted`: their
/// rows are here, and ours are read. By the threads of one block, when all blocks have done their work.
template <bool kRails, class Policy>
DEEP_EP_DEVICE void end_together(const TransferParams& params, const Policy& policy, IntranodeSignal signal,
                                 Wanted wanted, std::uint64_t epoch) {
  const NormalParams& common = params.common;
  decltype(auto) grid = grid_of<kRails>(common);
  const bool failed = aborted(params.wait);  // a block has failed: no rank may take its rows for stored
  for (int index = thread_index(); !failed && index < grid.width; index += block_threads()) {
    store_release<Scope::system>(common.signal_to(grid.first_of_node() + index, signal), Progress::at(epoch, 1));
  }
  // Behind the signals, which would wait for these stores.
  if (thread_index() == 0) {
    store_relaxed<Scope::gpu>(&common.state->dispatch_next_token, std::uint32_t{0});
    store_relaxed<Scope::gpu>(&common.state->combine_next_part, std::uint32_t{0});
  }
  for (int number = thread_index(); number < grid.others(); number += block_threads()) {
    store_relaxed<Scope::gpu>(&common.rails[number].next_chunk, std::uint32_t{0});
  }
  for (int index = thread_index(); index < grid.width; index += block_threads()) {
    store_relaxed<Scope::gpu>(common.local_tickets + index, std::uint32_t{0});
  }
  if (failed) return;
  for (int index = thread_index(); index < grid.width; index += block_threads()) {
    const int peer = grid.first_of_node() + index;
    wait_signal(policy, common.signal_from(peer, signal), {peer, wanted, Progress::at(epoch, 1)});
  }
}

}  // namespace deep_ep::device::normal
