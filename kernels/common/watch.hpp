// Who is lost? Ranks that wait for each other must come to one answer: the rank that everybody waits for in the end.
//
// Nothing of this is read or written before a wait has taken an eighth of its deadline. From then on
//
//   - a rank that waits says so: it changes its beat, a word of its heap. Whoever waits for it sees that it is alive
//   and
//     waits for somebody else. So only the rank at the end of such a chain, which does not say that it waits, is late;
//   - when a deadline has passed since the wait began, and since the peer's beat last changed, the waiter accuses the
//     peer, on a board that lies in the heap of the node's first rank (the memory outlives the rank's process, as
//     others map it). Entries are written once, by compare-and-exchange into the first that is free, after all before
//     it have been read. A rank that finds itself accused accuses nobody. So every entry counts, and all read the same
//     ones;
//   - whoever waits reads the board and takes an accusation for its own finding: it masks the rank, or ends the call in
//     its name, without waiting for the rest of its own deadline.
//
// A rank that has stood still itself must not accuse those who went on without it: a waiter that has not looked for
// half a deadline begins anew. Ranks that wait for each other in a circle (a program that mixes up its calls) would do
// so for ever: so a beat helps for a few deadlines only.
//
// Ranks of other nodes see neither beats nor board. They are given half a deadline more: time for their own node to
// find who is lost, and to go on.
#pragma once

#include "kernels/common/faults.hpp"
#include "kernels/common/limits.hpp"
#include "kernels/primitives/memory.hpp"

namespace deep_ep {

/// One rank's word that another is lost.
struct Accusation {
  int accuser = 0, accused = 0;
  Wanted wanted = Wanted::nothing;

  /// Never 0.
  DEEP_EP_HOST_DEVICE std::uint64_t packed() const {
    return std::uint64_t{1} << 63 | static_cast<std::uint64_t>(wanted) << 32 |
           static_cast<std::uint64_t>(accuser) << 16 | static_cast<std::uint64_t>(accused);
  }
  DEEP_EP_HOST_DEVICE static Accusation unpack(std::uint64_t word) {
    return {static_cast<int>(word >> 16 & 0xffffu), static_cast<int>(word & 0xffffu),
            static_cast<Wanted>(word >> 32 & 0xffffu)};
  }
  DEEP_EP_HOST_DEVICE bool operator==(const Accusation&) const = default;
};

/// In the heap of every rank. Zero when the buffer is made.
struct alignas(kLine) WaitBoard {
  std::uint64_t beat;                               ///< of the rank whose heap it is
  alignas(kLine) std::uint64_t entries[kMaxRanks];  ///< of the node, in its first rank's heap. 0: none yet
};

/// What a rank knows of the others, in its device memory.
struct WaitWatch {
  struct Peer {
    const std::uint64_t* beat;  ///< nullptr: of another node
    std::uint64_t seen;         ///< what it was
    std::uint64_t moved;        ///< when that was seen first, in now_ns()
  };
  int rank;
  bool masks;              ///< low-latency calls go on without ranks that are lost
  std::uint64_t* beat;     ///< this rank's
  std::uint64_t* entries;  ///< [kMaxRanks], of the node's board
  std::uint32_t read;      ///< with masks: entries that this rank has acted upon
  std::uint64_t looked;    ///< when a long wait of this rank looked last
  std::uint64_t woke;      ///< when this rank had stood still last
  Peer peers[kMaxRanks];
};

namespace device {

/// What a wait finds that looks up from its signal.
struct WaitFinding {
  bool late = false;  ///< the peer is to be accused
  bool news = false;  ///< there is an accusation that this rank has not acted upon
  std::uint32_t entry = 0;
  Accusation accusation{};
};

constexpr int kQuietPart = 8;  ///< a wait looks up when this part of its deadline is over
constexpr int kMostDeadlines = 2, kMostDeadlinesWithMasks = 4;

/// Has `peer` shown for so long neither what is waited for nor that it waits itself? `peer` negative: nobody in
/// particular.
DEEP_EP_DEVICE bool shows_nothing(WaitWatch& watch, int peer, std::uint64_t begin, std::uint64_t now,
                                  std::uint64_t timeout) {
  // Threads look side by side: what another has noted may be later than `now`.
  const auto over = [&](std::uint64_t from, std::uint64_t time) { return now > from && now - from > time; };
  const std::uint64_t looked = load_acquire<Scope::gpu>(&watch.looked);
  if (over(looked > begin ? looked : begin, timeout / 2)) store_relaxed<Scope::gpu>(&watch.woke, now);
  store_release<Scope::gpu>(&watch.looked, now);
  const std::uint64_t woke = load_relaxed<Scope::gpu>(&watch.woke);
  const std::uint64_t since = woke > begin ? woke : begin;
  if (peer < 0) return over(since, timeout);
  WaitWatch::Peer& other = watch.peers[peer];
  if (other.beat == nullptr) return over(since, timeout + timeout / 2);
  const std::uint64_t beat = load_relaxed<Scope::system>(other.beat);
  if (beat != load_relaxed<Scope::gpu>(&other.seen)) {
    store_relaxed<Scope::gpu>(&other.moved, now);
    store_relaxed<Scope::gpu>(&other.seen, beat);
  }
  if (over(since, timeout * (watch.masks ? kMostDeadlinesWithMasks : kMostDeadlines))) return true;
  const std::uint64_t moved = load_relaxed<Scope::gpu>(&other.moved);
  return over(moved > since ? moved : since, timeout);
}

/// By one thread, now and then, of a wait for `peer` that began at `begin`.
DEEP_EP_DEVICE WaitFinding look_up(const WaitContext& context, int peer, std::uint64_t begin) {
  const std::uint64_t timeout = context.timeout_ns;
  const std::uint64_t now = now_ns();
  if (timeout == 0 || now - begin <= timeout / kQuietPart) return {};
  if (context.watch == nullptr) return {.late = now - begin > timeout};
  WaitWatch& watch = *context.watch;
  store_relaxed<Scope::system>(watch.beat, now);
  const std::uint32_t read = load_relaxed<Scope::gpu>(&watch.read);
  const std::uint64_t entry = read < kMaxRanks ? load_acquire<Scope::system>(watch.entries + read) : 0;
  if (entry != 0) return {.news = true, .entry = read, .accusation = Accusation::unpack(entry)};
  return {.late = shows_nothing(watch, peer, begin, now, timeout)};
}

/// Ends the call of this rank, as the ranks have found that one is lost: this one, or another.
DEEP_EP_DEVICE void end_by_accusation(const WaitContext& context, const Accusation& found) {
  const WaitWatch& watch = *context.watch;
  if (found.accused == watch.rank) {
    report_fault(context, FaultKind::given_up, found.wanted, found.accuser, watch.masks ? 1 : 0, 0, 0);
  } else {
    report_fault(context, FaultKind::timeout, found.wanted, found.accused, 1 + found.accuser, 0, 0);
  }
}

/// Writes the accusation to the board unless the entry is taken. What stands there then.
DEEP_EP_DEVICE Accusation accuse(const WaitWatch& watch, std::uint32_t entry, const Accusation& mine) {
  const std::uint64_t before = compare_exchange<Scope::system>(watch.entries + entry, 0, mine.packed());
  return before == 0 ? mine : Accusation::unpack(before);
}

}  // namespace device
}  // namespace deep_ep
