// How ranks hear of accusations where all are near: see watch.hpp. news.hpp is for all others.
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

/// What a near rank shows.
DEEP_EP_DEVICE LowLatencySigns& signs_of(const LowLatencyParams& common, int rank) {
  return *common.window.signs().in(rank == common.rank ? common.local : common.heaps[rank]);
}

/// What a near peer owes in a call.
DEEP_EP_DEVICE Awaited rows_of_near(const LowLatencyParams& common, const WatchedCall& call, int peer) {
  const bool dispatch = call.kind == LowLatencyKind::dispatch;
  if (load_relaxed<Scope::system>(&signs_of(common, peer).sent[static_cast<int>(call.kind)]) < call.sent) {
    const Wanted rows = dispatch ? Wanted::low_latency_dispatch_rows : Wanted::low_latency_combine_rows;
    return {peer, rows, call.sent};
  }
  return {peer, Wanted::nothing, 0};
}

/// Has a wait of this rank masked the peer, as its own deadline had passed? Nobody has agreed to that.
DEEP_EP_DEVICE bool masked_by_own_deadline(const LowLatencyParams& common, int peer) {
  const FaultRecord& why = common.masked[peer];
  return load_acquire<Scope::system>(&why.written) != 0 && why.kind == FaultKind::timeout && why.field == 0;
}

/// The board, a list in the heap of rank 0. All members are those that a Watcher asks of how ranks hear of each other.
class Board {
 public:
  static constexpr bool kTellsEnd = false;  ///< see tell_end()

  DEEP_EP_DEVICE explicit Board(const LowLatencyParams& params) : common(params) {}

  /// May this thread look now? Always: other watchers of the rank may, too.
  DEEP_EP_DEVICE bool begin() { return true; }
  DEEP_EP_DEVICE void end() {}
  /// Tells others that this rank is there. Who is near sees it.
  DEEP_EP_DEVICE void show() {}
  /// The call is over: nobody waits for completions any more.
  DEEP_EP_DEVICE void stop_posting() {}

  /// Changes as long as the peer shows something.
  DEEP_EP_DEVICE std::uint64_t sign_of(int peer) const {
    return load_relaxed<Scope::system>(&signs_of(common, peer).beat);
  }
  /// Does it owe this rank anything of what it sends?
  DEEP_EP_DEVICE Awaited rows_of(const WatchedCall& call, int peer) const { return rows_of_near(common, call, peer); }
  /// Has this rank found out, by another way than an accusation, that the peer is lost?
  DEEP_EP_DEVICE bool is_unreachable(int) const { return false; }

  /// The first accusation that has not been acted upon; done() when it has.
  DEEP_EP_DEVICE bool next(Accusation& found) {
    index_ = load_relaxed<Scope::gpu>(&common.state->watch.read);
    const std::uint64_t word = index_ < kMostAccusations ? load_acquire<Scope::system>(entry(index_)) : 0;
    if (word != 0) found = Accusation::unpack(word);
    return word != 0;
  }
  DEEP_EP_DEVICE void done() {
    std::uint32_t& read = common.state->watch.read;
    if (load_relaxed<Scope::gpu>(&read) <= index_) store_relaxed<Scope::gpu>(&read, index_ + 1);
  }
  /// Is it news? Then, before it is acted upon, pass_on().
  DEEP_EP_DEVICE bool is_new(const Accusation& found) const { return !masked(common, found.accused); }
  DEEP_EP_DEVICE bool pass_on(const Accusation&) { return true; }

  /// Puts an accusation on the board, behind all others, which the watcher acts upon first; then upon this one. False:
  /// the board is full.
  template <class Watcher>
  DEEP_EP_DEVICE bool accuse(const Accusation& mine, Watcher& watcher) {
#pragma unroll 1
    for (index_ = load_relaxed<Scope::gpu>(&common.state->watch.read); index_ < kMostAccusations; ++index_) {
      const std::uint64_t before = compare_exchange<Scope::system>(entry(index_), 0, mine.packed());
      const Accusation found = before == 0 ? mine : Accusation::unpack(before);
      if (!watcher.act_upon(found) || found.accused == mine.accused) return true;
    }
    return false;
  }

  /// This rank has ended a call, as ranks disagree about it. Who waits for it sees that: it has not shown that it sent.
  DEEP_EP_DEVICE void tell_end() {}

  /// What concerns a rank that is unmasked, or that the program masks.
  DEEP_EP_DEVICE void forgive(int) {}
  DEEP_EP_DEVICE void note_by_hand(int) {}
  /// When a call ends: has anything happened that takes a last look?
  DEEP_EP_DEVICE bool has_told() const { return false; }
  DEEP_EP_DEVICE void settle() {}
  /// Near ranks see what the host writes.
  DEEP_EP_DEVICE void tell_ending(std::uint64_t) {}

 private:
  DEEP_EP_DEVICE std::uint64_t* entry(std::uint32_t index) const {
    return common.window.accusation(index).in(common.rank == 0 ? common.local : common.heaps[0]);
  }

  const LowLatencyParams& common;
  std::uint32_t index_ = 0;
};

}  // namespace deep_ep::device::low_latency
