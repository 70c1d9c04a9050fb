// The part of the control thread that looks at waits: what kernels of this rank report, what other ranks tell of
// theirs, and the verdict on ranks that keep others waiting for longer than the time-out.
//
// Kernels say now and then for whom they wait, and for how long. A rank tells all others when a wait has lasted for an
// eighth of the time-out, 16 times in a time-out while it lasts, and at once when it has lasted too long. That is also
// how a rank that waits itself shows that it is not the one to blame.
#include <algorithm>

#include "csrc/control/plane.hpp"

namespace deep_ep::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr int kLooks = 64;           ///< in a time-out
constexpr int kSteps = 16;           ///< of a member's time: a process that stood still has waited for one at most
constexpr int kReports = 16;         ///< in a time-out, of a wait that lasts ...
constexpr int kBeforeReports = 8;    ///< ... longer than this part of it
constexpr int kEndsAfter = 4;        ///< a wait that shows no beat for this part of a time-out has ended
constexpr int kForgottenAfter = 2;   ///< so has another rank's, of which nothing is heard for this part
constexpr int kLooksToBeLate = 2;    ///< a wait that is over may have been seen once
constexpr int kBetweenDeciders = 8;  ///< the next rank decides after this part of a time-out ...
constexpr auto kLeastBetweenDeciders = milliseconds(20);
constexpr int kMostDecidersInTurn = 8;  ///< ... and all that are left at once after so many parts
constexpr auto kMostBetweenLooks = milliseconds(250);
constexpr auto kMostBetweenLooksWithMasks = milliseconds(20);
/// After the first failure of a queue pair: others may be about to fail, and show which end it is.
constexpr auto kToSettle = milliseconds(50);

auto load(const auto& words, std::size_t index) { return __atomic_load_n(&words[index], __ATOMIC_RELAXED); }

}  // namespace

milliseconds Plane::between_looks(const Member& member) const {
  const auto part = std::chrono::ceil<milliseconds>(member.timeout() / kLooks);
  return std::clamp(part, milliseconds(1), member.options.masks ? kMostBetweenLooksWithMasks : kMostBetweenLooks);
}

void Plane::look_at_waits(Member& member, Clock::time_point now) {
  if (!member.watches() || now < member.looked + between_looks(member)) return;
  const bool ends = member.timeout() > nanoseconds::zero();  // waits have deadlines
  const nanoseconds step = ends ? member.timeout() / kSteps : nanoseconds(kMostBetweenLooks);
  member.time += std::min<nanoseconds>(now - member.looked, step);
  member.looked = now;
  if (ends) look_at_own(member);
  std::erase_if(member.waits,
                [&](const TheirWait& wait) { return member.time - wait.heard > member.timeout() / kForgottenAfter; });
  look_for_failures(member);
  judge_waits(member);
}

void Plane::look_at_own(Member& member) {
  const nanoseconds timeout = member.timeout();
  const bool reports = member.time - member.reported >= timeout / kReports;
  int longest = kNobody;
  for (int peer = 0; peer < member.size(); ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    OwnWait& wait = member.at(peer).own;
    const std::uint32_t beats = load(member.words.beats, p);
    const nanoseconds said(load(member.words.waits, p));
    if (beats == wait.beats) {
      if (!wait.lasts || member.time - wait.moved <= timeout / kEndsAfter) continue;
      if (std::exchange(wait.told_late, false)) report(member, peer, nanoseconds::zero(), false);
      // A long one goes on if the next beat says so: on a very busy machine beats come as seldom as that.
      if (wait.longest < timeout / kBeforeReports) wait = {.beats = beats};
      continue;
    }
    // Of waits that last at the same time, the longest counts. Once it has not been heard of for a while it has ended,
    // though shorter ones for the same peer go on.
    const bool is_shorter = said < wait.longest;
    if (!wait.lasts || (is_shorter && member.time - wait.longest_at > timeout / kEndsAfter)) {
      if (wait.told_late) report(member, peer, nanoseconds::zero(), false);
      wait = {.lasts = true, .since = member.time, .longest_at = member.time};
    } else if (!is_shorter) {
      wait.longest_at = member.time;
    }
    wait.beats = beats;
    wait.moved = member.time;
    wait.longest = std::max(wait.longest, said);
    const nanoseconds lasted = wait.lasted(member.time);
    if (lasted >= timeout) ++wait.late_looks;
    const bool late = wait.late_looks >= kLooksToBeLate;
    if (late && (reports || !wait.told_late)) {
      wait.told_late = true;
      report(member, peer, lasted, true);
    }
    const bool is_longest = longest == kNobody || lasted > member.at(longest).own.lasted(member.time);
    if (!late && lasted >= timeout / kBeforeReports && is_longest) longest = peer;
  }
  // One is enough to show that this rank waits itself. If none has shown a beat since the last look, the next beat is
  // reported: on a busy machine beats may come more seldom than reports are due.
  if (reports && longest != kNobody) {
    report(member, longest, member.at(longest).own.lasted(member.time), false);
  }
}

void Plane::report(Member& member, int peer, nanoseconds lasted, bool late) {
  Message message = about(member, MessageType::waits);
  message.peer = peer;
  message.ns = static_cast<std::uint64_t>(lasted.count());
  message.flag = late ? 1 : 0;
  const auto p = static_cast<std::size_t>(peer);
  if (p < member.words.wanted.size()) message.wanted = load(member.words.wanted, p);
  if (message.ns != 0) member.reported = member.time;
  broadcast(message);
}

void Plane::hear_of_wait(Member& member, const Message& message) {
  std::erase_if(member.waits,
                [&](const TheirWait& wait) { return wait.rank == message.rank && wait.peer == message.peer; });
  if (message.ns == 0) return;
  member.waits.push_back({.rank = message.rank,
                          .peer = message.peer,
                          .late = message.flag != 0,
                          .wanted = message.wanted,
                          .lasted = nanoseconds(message.ns),
                          .heard = member.time});
}

void Plane::show_sign(const Token& process, const Message& message) {
  for (Member& member : members_) {
    // A rank that waits in another buffer is not silent in this one. If a process has several ranks of a buffer, the
    // message does not say which of them waits.
    const bool one_rank = std::ranges::count(member.ranks, process, &Rank::process) == 1;
    for (int rank = 0; rank < member.size(); ++rank) {
      if (!(member.at(rank).process == process)) continue;
      const bool itself = member.buffer == message.buffer && rank == message.rank;
      if (one_rank || itself) member.at(rank).sign = member.time;
    }
  }
}

void Plane::look_for_failures(Member& member) {
  for (int peer = 0; peer < std::min(member.size(), static_cast<int>(member.words.failed.size())); ++peer) {
    const RankPair pair{member.rank, peer};
    if (load(member.words.failed, static_cast<std::size_t>(peer)) == 0) continue;
    if (member.options.masks && member.at(peer).lost != kNobody) continue;
    if (std::ranges::find(member.failed, pair) != member.failed.end()) continue;
    Message message = about(member, MessageType::failed);
    message.peer = peer;
    broadcast(message);
  }
}

bool Plane::leaves_out(const Member& member, int rank, int peer) {
  return std::ranges::find(member.left_out, RankPair{rank, peer}) != member.left_out.end();
}

void Plane::judge_waits(Member& member) {
  std::vector<RankSigns> signs;
  for (const Rank& rank : member.ranks) {
    signs.push_back({.lost = rank.lost != kNobody,
                     .silent = member.timeout() > nanoseconds::zero() && member.time - rank.sign >= member.timeout()});
  }
  std::vector<RankPair> late;
  for (const TheirWait& wait : member.waits) {
    // The peer's program leaves the waiting rank out, so nothing comes from the peer.
    if (wait.late && !leaves_out(member, wait.peer, wait.rank)) late.push_back({wait.rank, wait.peer});
  }
  std::vector<Blame> silent = silent_ranks(signs, late);
  if (!member.options.masks) {
    bool changed = false;
    for (const Blame& blame : silent) {
      // This rank knows better: it is about to go on.
      if (blame.rank == member.rank || std::exchange(member.at(blame.rank).facts.silent, true)) continue;
      member.verdicts.push_back({.rank = blame.rank, .why = LostWhy::silent, .by = blame.by});
      changed = true;
    }
    if (changed) judge_member(member);
    return;
  }
  std::vector<Blame> unreachable;
  if (member.time - member.failed_at >= kToSettle) unreachable = unreachable_ranks(signs, member.failed);
  if (silent.empty() && unreachable.empty()) {
    member.blamed_since = member.time;
    return;
  }
  for (int rank = 0; rank < member.size(); ++rank) {  // these decide nothing
    if (member.at(rank).left || leaves_out(member, member.rank, rank))
      signs[static_cast<std::size_t>(rank)].lost = true;
  }
  // One with failed queue pairs may still decide; a silent one may be stopped.
  const int turn = std::min(deciders_before(member.rank, signs, silent), kMostDecidersInTurn);
  const nanoseconds between = std::max<nanoseconds>(member.timeout() / kBetweenDeciders, kLeastBetweenDeciders);
  if (member.time - member.blamed_since < turn * between) return;
  for (const Blame& blame : silent) {
    LostRank verdict{.rank = blame.rank, .why = LostWhy::silent, .by = blame.by};
    for (const TheirWait& wait : member.waits) {
      if (wait.rank != blame.by || wait.peer != blame.rank) continue;
      verdict.wanted = wait.wanted;
      verdict.waited_s = std::chrono::duration<double>(wait.lasted).count();
    }
    lose(member, verdict);
  }
  for (const Blame& blame : unreachable) lose(member, {.rank = blame.rank, .why = LostWhy::failed, .by = blame.by});
}

void Plane::lose(Member& member, const LostRank& verdict) {
  if (member.at(verdict.rank).lost != kNobody) return;
  member.at(verdict.rank).lost = verdict.rank;
  member.verdicts.push_back(verdict);
  std::erase_if(member.failed,
                [&](const RankPair& pair) { return pair.rank == verdict.rank || pair.peer == verdict.rank; });
  Message message = about(member, MessageType::lost);
  message.peer = verdict.rank;
  message.by = verdict.by;
  message.why = static_cast<std::uint32_t>(verdict.why);
  message.wanted = verdict.wanted;
  message.ns = static_cast<std::uint64_t>(verdict.waited_s * 1e9);
  broadcast(message);  // before this rank's own kernels hear of it
  const bool is_own = verdict.rank == member.rank;
  show_lost(member, verdict.rank, is_own && verdict.by != kNobody ? verdict.by : verdict.rank);
  if (member.words.changes != nullptr) __atomic_fetch_add(member.words.changes, 1, __ATOMIC_RELEASE);
}

}  // namespace deep_ep::control
