// Who is lost? Ranks that may be masked come to one answer. Kernels of their own (*_watched) do the work of the usual
// ones, whose waits end when a rank is masked, or the call is over. One more block, the last of the grid, of which one
// thread works, decides about that. In its heap a rank shows near ones
//
//   - a beat, which changes as long as a call of it runs: when its first block begins, then 16 times in a deadline. It
//     waits itself then, or works; somebody else is at fault;
//   - for each kind of calls the last one whose send part has ended: it owes nobody anything of that call.
//
// Nobody looks at that before a call has taken an eighth of the deadline. Then the watcher of a rank, at each look,
//
//   1. reads accusations. It masks the ranks that are accused. If it finds its own, it ends the call: the others go on
//      without it;
//   2. goes through the peers. One whose beat has not changed for a whole deadline, and that still owes it something in
//      this call, is lost: the watcher accuses it, and masks it.
//
// Where all are near, accusations stand on a board: a list in the heap of rank 0. (That memory outlives the process, as
// others map it.) An accusation is written once, by compare-and-exchange into the first free entry, after all before it
// have been acted upon. So all ranks that go on mask the same ranks in the same order, as far as they have read; and a
// rank that reads its own name accuses nobody any more.
//
// Where some are far (news.hpp), the memory of a dead rank is gone, and there is no such place. But a rank that has
// been given up stays so, and it does not matter who is first. So ranks pass accusations on: each has a list for each
// other one, in the heap of the one that reads it. Who accuses a rank, or reads for the first time that it is accused,
// tells all others that it has not masked, and the accused one, and only then masks it. An accuser that dies half way
// has told nobody, or somebody who tells the rest. Two that accuse each other are both lost, to everybody.
//
// To far ranks a watcher sends its beat, at each look, so that calls that do not wait send nothing; whatever else comes
// from a far rank is as good as a beat. What a far rank owes follows from words in the own heap, which say what has
// come of it (*/debts.hpp). One whose queue pair fails is accused at once.
//
// Whoever is slow by less than a deadline shows something in time and is never accused.
//
// A rank that has stood still itself must not accuse those that went on: its watch counts no more than a quarter of a
// deadline from one look to the next. It takes several looks to accuse somebody, and the first of them reads what it is
// accused of. For the same reason a wait ends after a bounded number of looks, however far apart they are.
//
// Ranks that mix up their calls wait for each other and all show that they do: after eight deadlines in which nobody
// has been masked, the call ends with a time-out.
//
// The block that watches may get no multiprocessor before the others have ended. So their waits have a deadline after
// all, three times as long as that. Whom they mask then has been agreed with nobody: the watcher finds it when it comes
// at last, and the call ends with a time-out.
#pragma once

#include <type_traits>

#include "kernels/low_latency/transport/accusations.hpp"
#include "kernels/low_latency/transport/news.hpp"

namespace deep_ep::device::low_latency {

/// What a watcher knows of a peer.
struct WatchedPeer {
  std::uint64_t beat;   ///< as last seen
  std::uint64_t moved;  ///< when that was seen first, in `waited`
};

/// By one thread, for as long as a kernel runs. `Word` is how ranks hear of each other: Board or News.
template <class Word>
struct BasicWatcher {
  using Peer = WatchedPeer;
  static constexpr std::uint64_t kLooks = 16;      ///< in a deadline
  static constexpr std::uint64_t kQuiet = 8;       ///< this part of a deadline passes before it looks at others
  static constexpr std::uint64_t kLeastLooks = 4;  ///< as many as a deadline takes at least
  static constexpr std::uint64_t kMostDeadlines = 8;
  static constexpr std::uint64_t kWaitDeadlines = 3 * kMostDeadlines;  ///< of a wait where nobody watches

  const LowLatencyParams& common;
  Word word;
  WatchedCall call;
  Peer* peers;                ///< [num_ranks]
  std::uint64_t looked;       ///< last, in now_ns()
  std::uint64_t waited = 0;   ///< nanoseconds, each look's as far as they count
  std::uint64_t changed = 0;  ///< when a rank was masked last, in `waited`

  DEEP_EP_DEVICE BasicWatcher(const LowLatencyParams& params, const Word& how, const WatchedCall& watched,
                              Peer* of_peers, std::uint64_t now)
      : common(params), word(how), call(watched), peers(of_peers), looked(now) {
    for (int peer = 0; peer < common.num_ranks; ++peer) peers[peer] = {~std::uint64_t{0}, 0};
  }

  /// Two kernels of a rank may run at once.
  DEEP_EP_DEVICE static void show_beat(const LowLatencyParams& common) {
    add_relaxed<Scope::system>(&common.window.signs().in(common.local)->beat, std::uint64_t{1});
  }

  DEEP_EP_DEVICE void look(std::uint64_t now) {
    const std::uint64_t timeout = watch().timeout_ns;
    const std::uint64_t passed = now > looked ? now - looked : 0;
    if (timeout == 0 || passed < timeout / kLooks) return;
    looked = now;
    waited += passed < timeout / kLeastLooks ? passed : timeout / kLeastLooks;
    show_beat(common);
    if (aborted(common.wait)) word.stop_posting();
    if (waited < timeout / kQuiet || !word.begin()) return;
    word.show();
    read();
    look_at_peers(timeout);
    word.end();
  }

  /// When all other blocks have ended: has one of them masked somebody?
  DEEP_EP_DEVICE void finish() {
    const std::uint64_t version = load_acquire<Scope::gpu>(&common.state->mask_version);
    const bool refused = Word::kTellsEnd && has_refused();
    if (version <= load_relaxed<Scope::gpu>(&watch().agreed) && !word.has_told() && !refused) return;
    if (!begin()) return;
    if (refused) word.tell_end();
    read();
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks && !aborted(common.wait); ++peer) {
      // By a wait that has run into its own deadline?
      if (!masked_by_own_deadline(common, peer)) continue;
      const FaultRecord& why = common.masked[peer];
      end_by_timeout({peer, why.wanted, why.expected}, kWaitDeadlines);
    }
    accuse_unreachable();
    if (refused || !aborted(common.wait)) word.settle();
    if (!aborted(common.wait)) store_relaxed<Scope::gpu>(&watch().agreed, version);
    word.end();
  }

  /// Unmasks a rank, or all (-1). What has been said against it so far is never acted upon; what others are accused of
  /// is, if one rank alone is unmasked.
  DEEP_EP_DEVICE void unmask(int rank) {
    if (!begin()) return;
    Accusation found;
#pragma unroll 1
    while (word.next(found)) {
      if (rank < 0 || found.accused == rank) {
        word.done();
      } else if (!act_upon(found)) {
        break;
      }
    }
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks; ++peer) {
      if (rank >= 0 && peer != rank) continue;
      store_relaxed<Scope::gpu>(common.mask + peer, 0);
      word.forgive(peer);
    }
    if (word.has_told()) word.settle();
    word.end();
  }
  /// As the program says.
  DEEP_EP_DEVICE void mask(int rank) {
    if (!begin()) return;
    word.note_by_hand(rank);
    store_relaxed<Scope::gpu>(common.mask + rank, 1);
    word.end();
  }

  /// Reads accusations, though no call is under way.
  DEEP_EP_DEVICE void hear() {
    if (!begin()) return;
    read();
    if (word.has_told()) word.settle();
    word.end();
  }
  /// Shows far ranks how far this one is with the end of its buffer.
  DEEP_EP_DEVICE void tell_ending(std::uint64_t more) {
    if (!begin()) return;
    word.tell_ending(more);
    word.end();
  }

  // What `word` calls.

  DEEP_EP_DEVICE void mask_accused(const Accusation& found) {
    changed = waited;
    if (masked(common, found.accused)) return;
    add_relaxed<Scope::gpu>(&watch().agreed, std::uint64_t{2});
    MaskOrEnd{common}.mask_rank({found.accused, found.wanted, 0}, 0, 1 + found.accuser);
  }

  /// False: this rank is accused.
  DEEP_EP_DEVICE bool act_upon(const Accusation& found) {
    if (found.accused == common.rank) {
      report_fault(common.wait, FaultKind::given_up, found.wanted, found.accuser, 0, 0, 0);
      return false;
    }
    if (word.is_new(found)) {
      word.pass_on(found);  // whose list is full hears of it from others, or accuses the rank itself
      mask_accused(found);
    }
    word.done();
    return true;
  }

 private:
  DEEP_EP_DEVICE LowLatencyWatch& watch() const { return common.state->watch; }
  /// Has this rank ended a call, as it disagrees with somebody?
  DEEP_EP_DEVICE bool has_refused() const {
    const FaultRecord& fault = *common.wait.fault;
    return aborted(common.wait) && load_acquire<Scope::system>(&fault.written) != 0 &&
           fault.kind == FaultKind::mismatch;
  }
  /// Another watcher of this rank, in a kernel that runs, may be looking. That is soon over: the only wait while it
  /// does is settle(), of a quarter of a deadline at most. Its queue pairs, of 1024 entries, have room for all that can
  /// ever be said between two low_latency_resume, and a beat. Whose kernel has not ended its look within a deadline has
  /// been ended in the middle of it, and nobody knows how far it got. Nobody goes on from there: the buffer breaks.
  DEEP_EP_DEVICE bool begin() {
    const std::uint64_t timeout = watch().timeout_ns;
    const bool may_look = poll_until([&](const Poll&) { return word.begin(); },
                                     [&](const Poll& poll) { return timeout != 0 && now_ns() - poll.begin > timeout; });
    if (!may_look) end_by_timeout({common.rank, Wanted::low_latency_look, 0}, 1);
    return may_look;
  }

  DEEP_EP_DEVICE void look_at_peers(std::uint64_t timeout) {
    accuse_unreachable();
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks && !aborted(common.wait); ++peer) {
      if (peer == common.rank || masked(common, peer)) continue;
      Peer& seen = peers[peer];
      const std::uint64_t beat = word.sign_of(peer);
      if (beat != seen.beat) {
        seen = {beat, waited};
      } else if (waited - seen.moved >= timeout) {
        const Awaited owed = owed_by(peer);
        if (owed.wanted != Wanted::nothing) accuse(owed);
      }
    }
    if (waited - changed > kMostDeadlines * timeout && !aborted(common.wait)) {
      end_by_timeout(still_owed(), kMostDeadlines);
    }
  }

  DEEP_EP_DEVICE Awaited owed_by(int peer) const {
    if (load_relaxed<Scope::system>(common.window.barrier(peer).in(common.local)) < call.barrier) {
      return {peer, Wanted::low_latency_barrier, call.barrier};
    }
    const bool dispatch = call.kind == LowLatencyKind::dispatch;
    if (load_relaxed<Scope::system>(common.window.acknowledged(call.kind, peer).in(common.local)) < call.received) {
      const Wanted room = dispatch ? Wanted::low_latency_dispatch_credit : Wanted::low_latency_combine_credit;
      return {peer, room, call.received};
    }
    return word.rows_of(call, peer);
  }
  /// By the last peer that owes something.
  DEEP_EP_DEVICE Awaited still_owed() const {
#pragma unroll 1
    for (int peer = common.num_ranks - 1; peer >= 0; --peer) {
      if (peer == common.rank || masked(common, peer)) continue;
      const Awaited owed = owed_by(peer);
      if (owed.wanted != Wanted::nothing) return owed;
    }
    return {common.rank, Wanted::nothing, 0};
  }

  DEEP_EP_DEVICE void end_by_timeout(const Awaited& owed, std::uint64_t deadlines) const {
    report_fault(common.wait, FaultKind::timeout, owed.wanted, owed.peer, static_cast<int>(deadlines), owed.expected,
                 0);
  }

  DEEP_EP_DEVICE void read() {
    Accusation found;
#pragma unroll 1
    while (word.next(found) && act_upon(found)) {
    }
  }

  DEEP_EP_DEVICE void accuse(const Awaited& owed) {
    const Accusation mine{common.rank, owed.peer, owed.wanted};
    if (word.accuse(mine, *this)) return;
    end_by_timeout(owed, 1);  // there is no room: programs have cleared masks again and again
  }
  DEEP_EP_DEVICE void accuse_unreachable() {
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks && !aborted(common.wait); ++peer) {
      if (peer != common.rank && word.is_unreachable(peer)) accuse({peer, Wanted::rdma_completion, 0});
    }
  }
};

/// Where all ranks are near.
struct Watcher : BasicWatcher<Board> {
  DEEP_EP_DEVICE Watcher(const LowLatencyParams& params, const WatchedCall& watched, Peer* of_peers, std::uint64_t now)
      : BasicWatcher(params, Board(params), watched, of_peers, now) {}
};
/// Where some are far.
template <class Debts>
struct FarWatcher : BasicWatcher<News<Debts>> {
  using Base = BasicWatcher<News<Debts>>;
  DEEP_EP_DEVICE FarWatcher(const LowLatencyParams& params, const Debts& debts, const WatchedCall& watched,
                            WatchedPeer* of_peers, std::uint64_t now)
      : Base(params, News<Debts>(params, debts), watched, of_peers, now) {}
};

/// By one thread of the block that watches, until all others have ended.
template <class AnyWatcher>
DEEP_EP_DEVICE void watch_until_all_ended(AnyWatcher watcher, std::uint32_t* ended) {
  const auto blocks = static_cast<std::uint32_t>(grid_blocks() - 1);
  poll_until([&](const Poll&) { return load_acquire<Scope::gpu>(ended) == blocks; },
             [&](const Poll&) {
               watcher.look(now_ns());
               return false;
             });
  watcher.finish();
  store_relaxed<Scope::gpu>(ended, std::uint32_t{0});
}

/// By all threads of every other block, when it begins. The first one shows that the rank has come: the block that
/// watches may have to wait for a multiprocessor.
DEEP_EP_DEVICE void begin_watched(const LowLatencyParams& common) {
  if (block_index() == 0 && thread_index() == 0) Watcher::show_beat(common);
}

/// By all threads of every other block, at its end.
DEEP_EP_DEVICE void end_watched(std::uint32_t* ended) {
  block::sync();
  if (thread_index() == 0) add_release<Scope::gpu>(ended, std::uint32_t{1});
}

/// A call of which one block watches while the others do `body`. `Debts`: what far peers owe in calls of this kind;
/// NoDebts where nobody is far.
template <LowLatencyKind kKind, class Debts = NoDebts, class Params, class Body>
DEEP_EP_DEVICE void run_watched(const Params& params, std::byte* memory, Body body) {
  const LowLatencyParams& common = params.common;
  std::uint32_t* ended = &common.state->watch.ended[static_cast<int>(kKind)];
  if (block_index() + 1 != grid_blocks()) {
    begin_watched(common);
    body(params, memory);
    return end_watched(ended);
  }
  if (thread_index() != 0) return;
  LowLatencyCounters& counters = common.counters(kKind);
  const LowLatencyEpochs epochs = counters.epochs();
  counters.arrive(epochs, params.phase);
  const WatchedCall call = WatchedCall::of(kKind, epochs, params.phase);
  auto* peers = reinterpret_cast<WatchedPeer*>(memory);
  if constexpr (std::is_same_v<Debts, NoDebts>) {
    watch_until_all_ended(Watcher(common, call, peers, now_ns()), ended);
  } else {
    const Debts debts(params, epochs);
    watch_until_all_ended(FarWatcher<Debts>(common, debts, call, peers, now_ns()), ended);
  }
  if (!sends(params.phase) || aborted(common.wait)) return;
  std::uint64_t* sent = common.window.signs().in(common.local)->sent + static_cast<int>(kKind);
  store_release<Scope::system>(sent, epochs.send);
}

}  // namespace deep_ep::device::low_latency
