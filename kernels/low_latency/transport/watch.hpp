// Who is lost? Where ranks are masked and all of them are near, they come to one answer. Kernels of their own
// (*_watched) do the work of the usual ones, whose waits end when a rank is masked, or the call is over. One more
// block, the last of the grid, of which one thread works, decides about that. In its heap a rank shows the others
//
//   - a beat, which changes as long as a call of it runs: when its first block begins, then 16 times in a deadline. It
//     waits itself then, or works; somebody else is at fault;
//   - for each kind of calls the last one whose send part has ended: it owes nobody anything of that call.
//
// Nobody looks at that before a call has taken an eighth of the deadline. Then the watcher of a rank, at each look,
//
//   1. reads the board: a list of accusations in the heap of rank 0. (That memory outlives the process, as others map
//      it.) It masks the ranks that are accused. If it finds its own, it ends the call: the others go on without it;
//   2. goes through the peers that still owe it something in this call. One whose beat has not changed for a whole
//      deadline is lost: the watcher accuses it, and masks it.
//
// An accusation is written once, by compare-and-exchange into the first free entry, after all before it have been acted
// upon. So all ranks that go on mask the same ranks in the same order, as far as they have read; and a rank that reads
// its own name accuses nobody any more. Whoever is slow by less than a deadline shows something in time and is never
// accused.
//
// A rank that has stood still itself must not accuse those that went on: its watch counts no more than a quarter of a
// deadline from one look to the next. It takes several looks to accuse somebody, and the first of them reads the board.
// For the same reason a wait ends after a bounded number of looks, however far apart they are.
//
// Ranks that mix up their calls wait for each other and all show that they do: after eight deadlines in which nobody
// has been masked, the call ends with a time-out.
//
// The block that watches may get no multiprocessor before the others have ended. So their waits have a deadline after
// all, three times as long as that. Whom they mask then has been agreed with nobody: the watcher finds it when it comes
// at last, and the call ends with a time-out.
#pragma once

#include "kernels/low_latency/transport/masks.hpp"

namespace deep_ep::device::low_latency {

/// One rank's word that another is lost.
struct Accusation {
  int accuser = 0, accused = 0;
  Wanted wanted = Wanted::nothing;

  /// Never 0.
  DEEP_EP_DEVICE std::uint64_t packed() const {
    return std::uint64_t{1} << 63 | static_cast<std::uint64_t>(wanted) << 32 |
           static_cast<std::uint64_t>(accuser) << 16 | static_cast<std::uint64_t>(accused);
  }
  DEEP_EP_DEVICE static Accusation unpack(std::uint64_t word) {
    return {static_cast<int>(word >> 16 & 0xffffu), static_cast<int>(word & 0xffffu),
            static_cast<Wanted>(word >> 32 & 0xffffu)};
  }
};

/// What a rank waits for in a call: 0 is nothing.
struct WatchedCall {
  LowLatencyKind kind;
  std::uint64_t received;  ///< each peer must say that it has received this call: there is room then
  std::uint64_t sent;      ///< each peer must have sent this call
  std::uint64_t barrier;   ///< each peer must have come to this barrier

  DEEP_EP_DEVICE static WatchedCall of(LowLatencyKind kind, const LowLatencyEpochs& epochs, LowLatencyPhase phase) {
    WatchedCall call{kind, 0, 0, 0};
    if (sends(phase) && epochs.send > 2) call.received = epochs.send - 2;
    // In combine the send part needs the selections of all owners, which are the first thing that they send.
    if (sends(phase) && kind == LowLatencyKind::combine) call.sent = epochs.send;
    if (receives(phase) && epochs.receive > call.sent) call.sent = epochs.receive;
    return call;
  }
};

/// By one thread, for as long as a kernel runs.
struct Watcher {
  /// What it knows of a peer.
  struct Peer {
    std::uint64_t beat;   ///< as last seen
    std::uint64_t moved;  ///< when that was seen first, in `waited`
  };
  static constexpr std::uint64_t kLooks = 16;      ///< in a deadline
  static constexpr std::uint64_t kQuiet = 8;       ///< this part of a deadline passes before it looks at others
  static constexpr std::uint64_t kLeastLooks = 4;  ///< as many as a deadline takes at least
  static constexpr std::uint64_t kMostDeadlines = 8;
  static constexpr std::uint64_t kWaitDeadlines = 3 * kMostDeadlines;  ///< of a wait where nobody watches

  const LowLatencyParams& common;
  WatchedCall call;
  Peer* peers;                ///< [num_ranks]
  std::uint64_t looked;       ///< last, in now_ns()
  std::uint64_t waited = 0;   ///< nanoseconds, each look's as far as they count
  std::uint64_t changed = 0;  ///< when a rank was masked last, in `waited`

  DEEP_EP_DEVICE Watcher(const LowLatencyParams& params, const WatchedCall& watched, Peer* of_peers, std::uint64_t now)
      : common(params), call(watched), peers(of_peers), looked(now) {
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
    if (waited < timeout / kQuiet) return;
    read_board();
    int owing = -1;
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks && !aborted(common.wait); ++peer) {
      if (peer == common.rank || masked(common, peer)) continue;
      const Awaited owed = owed_by(peer);
      if (owed.wanted == Wanted::nothing) continue;
      owing = peer;
      Peer& seen = peers[peer];
      const std::uint64_t beat = load_relaxed<Scope::system>(&signs_of(peer).beat);
      if (beat != seen.beat) {
        seen = {beat, waited};
      } else if (waited - seen.moved >= timeout) {
        accuse(owed);
      }
    }
    if (waited - changed > kMostDeadlines * timeout && !aborted(common.wait)) {
      const Awaited owed = owing >= 0 ? owed_by(owing) : Awaited{common.rank, Wanted::nothing, 0};
      end_by_timeout(owed, kMostDeadlines);
    }
  }

  /// When all other blocks have ended: has a wait of theirs run into its own deadline?
  DEEP_EP_DEVICE void finish() {
    if (load_acquire<Scope::gpu>(&common.state->mask_version) <= load_relaxed<Scope::gpu>(&watch().agreed)) return;
    read_board();
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks && !aborted(common.wait); ++peer) {
      const FaultRecord& why = common.masked[peer];
      if (load_acquire<Scope::system>(&why.written) == 0 || why.field != 0) continue;
      end_by_timeout({peer, why.wanted, why.expected}, kWaitDeadlines);
    }
  }

  /// Unmasks a rank, or all (-1). What has been said against it so far is never acted upon; what others are accused of
  /// is, if one rank alone is unmasked.
  DEEP_EP_DEVICE void unmask(int rank) {
    std::uint32_t index = load_relaxed<Scope::gpu>(&watch().read);
#pragma unroll 1
    for (; index < kMostAccusations; ++index) {
      const std::uint64_t word = load_acquire<Scope::system>(entry(index));
      if (word == 0) break;
      const Accusation found = Accusation::unpack(word);
      if (rank < 0 || found.accused == rank) {
        count_read(index);
      } else if (!act_upon(index, found)) {
        break;
      }
    }
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks; ++peer) {
      if (rank < 0 || peer == rank) store_relaxed<Scope::gpu>(common.mask + peer, 0);
    }
  }

 private:
  DEEP_EP_DEVICE LowLatencyWatch& watch() const { return common.state->watch; }
  DEEP_EP_DEVICE LowLatencySigns& signs_of(int rank) const {
    return *common.window.signs().in(rank == common.rank ? common.local : common.heaps[rank]);
  }
  DEEP_EP_DEVICE std::uint64_t* entry(std::uint32_t index) const {
    return common.window.accusation(index).in(common.rank == 0 ? common.local : common.heaps[0]);
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
    if (load_relaxed<Scope::system>(&signs_of(peer).sent[static_cast<int>(call.kind)]) < call.sent) {
      const Wanted rows = dispatch ? Wanted::low_latency_dispatch_rows : Wanted::low_latency_combine_rows;
      return {peer, rows, call.sent};
    }
    return {peer, Wanted::nothing, 0};
  }

  DEEP_EP_DEVICE void end_by_timeout(const Awaited& owed, std::uint64_t deadlines) const {
    report_fault(common.wait, FaultKind::timeout, owed.wanted, owed.peer, static_cast<int>(deadlines), owed.expected,
                 0);
  }

  DEEP_EP_DEVICE void count_read(std::uint32_t index) const {
    std::uint32_t& read = watch().read;
    if (load_relaxed<Scope::gpu>(&read) <= index) store_relaxed<Scope::gpu>(&read, index + 1);
  }

  /// False: this rank is accused.
  DEEP_EP_DEVICE bool act_upon(std::uint32_t index, const Accusation& found) {
    if (found.accused == common.rank) {
      report_fault(common.wait, FaultKind::given_up, found.wanted, found.accuser, 0, 0, 0);
      return false;
    }
    if (!masked(common, found.accused)) {
      add_relaxed<Scope::gpu>(&watch().agreed, std::uint64_t{2});
      MaskOrEnd{common}.mask_rank({found.accused, found.wanted, 0}, 0, 1 + found.accuser);
      changed = waited;
    }
    count_read(index);
    return true;
  }

  DEEP_EP_DEVICE void read_board() {
#pragma unroll 1
    for (std::uint32_t index = load_relaxed<Scope::gpu>(&watch().read); index < kMostAccusations; ++index) {
      const std::uint64_t word = load_acquire<Scope::system>(entry(index));
      if (word == 0 || !act_upon(index, Accusation::unpack(word))) return;
    }
  }

  DEEP_EP_DEVICE void accuse(const Awaited& owed) {
    const Accusation mine{common.rank, owed.peer, owed.wanted};
#pragma unroll 1
    for (std::uint32_t index = load_relaxed<Scope::gpu>(&watch().read); index < kMostAccusations; ++index) {
      const std::uint64_t before = compare_exchange<Scope::system>(entry(index), 0, mine.packed());
      const Accusation found = before == 0 ? mine : Accusation::unpack(before);
      if (!act_upon(index, found) || found.accused == owed.peer) return;
    }
    end_by_timeout(owed, 1);  // the board is full: programs have cleared masks again and again
  }
};

/// By one thread of the block that watches, until all others have ended.
DEEP_EP_DEVICE void watch_until_all_ended(const LowLatencyParams& common, const WatchedCall& call, std::uint32_t* ended,
                                          std::byte* memory) {
  Watcher watcher(common, call, reinterpret_cast<Watcher::Peer*>(memory), now_ns());
  const auto blocks = static_cast<std::uint32_t>(common.working_blocks);
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

/// A call of which one block watches while the others do `body`.
template <LowLatencyKind kKind, class Params, class Body>
DEEP_EP_DEVICE void run_watched(const Params& params, std::byte* memory, Body body) {
  const LowLatencyParams& common = params.common;
  std::uint32_t* ended = &common.state->watch.ended[static_cast<int>(kKind)];
  if (block_index() != common.working_blocks) {
    begin_watched(common);
    body(params, memory);
    return end_watched(ended);
  }
  if (thread_index() != 0) return;
  LowLatencyCounters& counters = common.counters(kKind);
  const LowLatencyEpochs epochs = counters.epochs();
  counters.arrive(epochs, params.phase);
  watch_until_all_ended(common, WatchedCall::of(kKind, epochs, params.phase), ended, memory);
  if (!sends(params.phase) || aborted(common.wait)) return;
  std::uint64_t* sent = common.window.signs().in(common.local)->sent + static_cast<int>(kKind);
  store_release<Scope::system>(sent, epochs.send);
}

}  // namespace deep_ep::device::low_latency
