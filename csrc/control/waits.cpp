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
constexpr int kBetweenDeciders = 8;  ///< the next rank decides after this part of a time-out ...
constexpr nanoseconds kLeastBetweenDeciders = milliseconds(20);
constexpr int kMostDecidersInTurn = 8;  ///< ... and all that are left at once after so many parts
constexpr nanoseconds kMostBetweenLooks = milliseconds(250);
constexpr nanoseconds kMostBetweenLooksWithMasks = milliseconds(20);
/// After the first failure of a queue pair: others may be about to fail, and show which end it is.
constexpr auto kToSettle = milliseconds(50);

auto load(const auto& words, int rank) {
  return __atomic_load_n(&words[static_cast<std::size_t>(rank)], __ATOMIC_RELAXED);
}

}  // namespace

/// Does what is due, and says when the next thing is.
Membership::Clock::time_point Membership::step(Clock::time_point now) {
  look_for_end();
  Clock::time_point next = now + std::chrono::seconds(60);
  // Other ranks may wait for this rank: they must hear at once that its wait has ended.
  if (!known_.told && !masks_ && !known_.verdicts.empty()) next = now + milliseconds(2);
  const bool ends = timeout_ > Time{};  // waits have deadlines
  if (!ends && !masks_) return next;    // nothing follows from waits
  const Time between =
      std::clamp<Time>(timeout_ / kLooks, milliseconds(1), masks_ ? kMostBetweenLooksWithMasks : kMostBetweenLooks);
  if (now >= looked_ + between) {
    time_ += std::min<Time>(now - looked_, ends ? timeout_ / kSteps : kMostBetweenLooks);
    looked_ = now;
    if (ends) look_at_own();
    std::erase_if(known_.waits, [&](const auto& one) { return time_ - one.second.heard > timeout_ / kForgottenAfter; });
    look_for_failures();
    judge_waits();
  }
  return std::min(next, looked_ + between);
}

void Membership::look_at_own() {
  const bool reports = time_ - reported_ >= timeout_ / kReports;
  int longest = kNobody;
  for (int peer = 0; peer < size(); ++peer) {
    OwnWait& wait = at(peer).own;
    const bool is_over = time_ - wait.heard > timeout_ / kEndsAfter;
    if (is_over && std::exchange(wait.late, false)) report(peer, {}, false);
    const std::uint32_t beats = load(words_.beats, peer);
    if (beats == std::exchange(wait.beats, beats)) continue;
    // On a very busy machine beats come so seldom that a long wait seems to be over: the next beat tells.
    const Time said(load(words_.waits, peer));
    const bool is_another = wait.longest < timeout_ / kBeforeReports || said < wait.longest;
    if (is_over && is_another) wait = {.beats = beats, .since = time_};
    if (said >= wait.longest) wait.longest = said, wait.heard = time_;
    const Time lasted = wait.lasted(time_);
    if (lasted >= timeout_) {
      if (reports || !wait.late) report(peer, lasted, true);
      wait.late = true;
    } else if (lasted >= timeout_ / kBeforeReports && (longest == kNobody || lasted > at(longest).own.lasted(time_))) {
      longest = peer;
    }
  }
  // One is enough to show that this rank waits itself. If none has shown a beat since the last look, the next beat is
  // reported: beats may come more seldom than reports are due.
  if (reports && longest != kNobody) report(longest, at(longest).own.lasted(time_), false);
}

void Membership::report(int peer, Time lasted, bool late) {
  const std::chrono::duration<double> seconds = lasted;
  if (lasted != Time{}) reported_ = time_;
  tell(MessageType::waits, {.rank = peer, .wanted = load(words_.wanted, peer), .waited_s = seconds.count()}, late);
}

void Membership::look_for_failures() {
  for (int peer = 0; peer < size(); ++peer) {
    if (load(words_.failed, peer) == 0) continue;
    if (masks_ && at(peer).lost != kNobody) continue;
    if (!known_.failed.contains({rank_, peer})) tell(MessageType::failed, {.rank = peer});
  }
}

void Membership::judge_waits() {
  std::vector<RankSigns> signs;
  for (const Rank& rank : ranks_) {
    signs.push_back({.lost = rank.lost != kNobody,
                     .silent = timeout_ > Time{} && time_ - rank.sign >= timeout_,
                     .waits_for = rank.waits_for});
  }
  std::vector<RankPair> late;
  for (const auto& [pair, wait] : known_.waits) {
    const bool is_owed = !leaves_out(pair.peer, pair.rank);  // else nothing comes from the peer
    if (wait.late && is_owed) late.push_back(pair);
  }
  const std::vector<Blame> silent = silent_ranks(signs, late);
  std::vector<Blame> unreachable;
  if (masks_ && time_ - known_.failed_at >= kToSettle) {
    unreachable = unreachable_ranks(signs, std::vector(known_.failed.begin(), known_.failed.end()));
  }
  if (silent.empty() && unreachable.empty()) {
    known_.blamed_since = time_;
    return;
  }
  if (masks_) {
    for (int rank = 0; rank < size(); ++rank) {  // these decide nothing
      if (at(rank).left || leaves_out(rank_, rank)) signs[static_cast<std::size_t>(rank)].lost = true;
    }
    // One with failed queue pairs may still decide; a silent one may be stopped.
    const int turn = std::min(deciders_before(rank_, signs, silent), kMostDecidersInTurn);
    if (time_ - known_.blamed_since < turn * std::max(timeout_ / kBetweenDeciders, kLeastBetweenDeciders)) return;
  }
  for (const Blame& blame : silent) {
    LostRank verdict = known_.waits[{blame.by, blame.rank}].report;
    verdict.why = LostWhy::silent;
    verdict.by = blame.by;
    if (masks_) {
      lose(verdict);
    } else if (blame.rank != rank_ && !std::exchange(at(blame.rank).facts.silent, true)) {
      // Not this rank itself: it knows better, and is about to go on.
      add(verdict);
    }
  }
  for (const Blame& blame : unreachable) lose({.rank = blame.rank, .why = LostWhy::failed, .by = blame.by});
  if (!masks_) judge();
}

}  // namespace deep_ep::control
