#include "csrc/control/membership.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <thread>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr auto kMostOfAnEnd = std::chrono::seconds(2);  ///< from the end of a process until it is known here

// Parts of a time-out.
constexpr int kSteps = 16;           ///< between two reports of a wait, and the most that time moves on between looks
constexpr int kBeforeReports = 8;    ///< a shorter wait is not reported
constexpr int kBetweenDeciders = 8;  ///< the next rank decides
constexpr int kEndsAfter = 4;        ///< a wait that has shown no beat is over
constexpr nanoseconds kMostBetweenDeciders = std::chrono::seconds(1);
/// After the first failure of a queue pair: others may be about to fail, and show which end it is.
constexpr nanoseconds kToSettle = milliseconds(50);
constexpr double kForEver = 1e9;  ///< s, as in kernels; not all doubles have their nanoseconds in 64 bits

auto load(const auto& words, int rank) { return __atomic_load_n(&words[index(rank)], __ATOMIC_RELAXED); }

}  // namespace

// ---- Joining and leaving ----

std::unique_ptr<Membership> Membership::join(const std::shared_ptr<Plane>& plane, Bootstrap& bootstrap,
                                             ControlWords& words, const JoinOptions& options) {
  const std::vector<ProcessInfo> ranks = all_gather_values(bootstrap, plane->info(options.by_tcp));
  const auto off = std::ranges::find(ranks, 0u, &ProcessInfo::on);
  if (off != ranks.end()) {
    const auto where = off - ranks.begin();
    if (options.masks) {
      fail<InvalidArgument>(
          "low_latency.masking is true, but DEEP_EP_CONTROL is off on rank {}; allowed with masking: on. Control "
          "threads decide which ranks are masked",
          where);
    }
    if (bootstrap.rank() == 0)
      log::info("control: off on rank {}, so a lost rank ends waits at their deadlines", where);
    return nullptr;
  }
  return std::make_unique<Membership>(plane, ranks[0].buffer, bootstrap.rank(), ranks, words, options);
}

Membership::Membership(std::shared_ptr<Plane> plane, std::uint64_t buffer, int rank, std::span<const ProcessInfo> ranks,
                       ControlWords& words, const JoinOptions& options)
    : plane_(std::move(plane)),
      rank_(rank),
      words_(words),
      masks_(options.masks),
      timeout_(std::llround(1e9 * (options.timeout_s == 0 ? kForEver : std::min(options.timeout_s, kForEver)))),
      looked_(Clock::now()) {
  std::unique_lock lock(plane_->mutex_);
  begin(buffer, ranks);
  plane_->members_.push_back(this);
  try {
    plane_->connect(*this, lock);
  } catch (...) {
    std::erase(plane_->members_, this);
    throw;
  }
}

void Membership::begin(std::uint64_t buffer, std::span<const ProcessInfo> ranks) {
  ranks_.clear();
  verdicts_.clear();
  for (const ProcessInfo& info : ranks) {
    const OwnWait none{.beats = load(words_.beats, static_cast<int>(ranks_.size())), .since = time_};
    ranks_.push_back({.info = info, .sign = time_ - timeout_, .own = none});  // silent so far
  }
  at(rank_).said = {{.buffer = buffer, .rank = rank_}, {}};
}

Membership::~Membership() {
  leave(Goodbye::ended);
  const std::lock_guard lock(plane_->mutex_);
  std::erase(plane_->members_, this);
}

void Membership::leave(Goodbye goodbye) {
  const std::lock_guard lock(plane_->mutex_);
  look_at_words();  // first: the reason why its calls have ended goes along, and how many it has made
  Report& said = at(rank_).said;
  // A rank that has gone alone has not met the others later.
  if (said.left == Goodbye::alone || goodbye <= said.left) return;
  said.left = goodbye;
  said.calls = load_calls();
  say();
}

std::vector<int> Membership::awaited_at_end() const {
  const std::lock_guard lock(plane_->mutex_);
  if (at(rank_).lost != kNobody) return {};  // the others do not wait, either
  std::vector<int> awaited;
  for (int rank = 0; rank < size(); ++rank) {
    const Rank& one = at(rank);
    if (one.said.left == Goodbye::none && one.lost == kNobody && report(rank_, rank).left_out == 0)
      awaited.push_back(rank);
  }
  return awaited;
}

void Membership::meet(double most_s) {
  leave(Goodbye::meets);
  const Deadline deadline(most_s);
  std::vector<int> awaited;
  while (!(awaited = awaited_at_end()).empty() && !deadline.expired()) std::this_thread::sleep_for(milliseconds(1));
  if (awaited.empty()) return;
  log::warn("buffer: rank {} waited {} s for {} to destroy the buffer, too, and goes alone", rank_, most_s,
            format_ranks(awaited));
}

// ---- Calls of the program ----

bool Membership::ended_by_error(int rank) const {
  const std::lock_guard lock(plane_->mutex_);
  return at(rank).said.gave_up_on == rank;
}

std::vector<LostRank> Membership::lost() const {
  const std::lock_guard lock(plane_->mutex_);
  return verdicts_;
}

std::vector<int> Membership::gone() const {
  const std::lock_guard lock(plane_->mutex_);
  std::vector<int> ranks;
  for (int rank = 0; rank < size(); ++rank) {
    // No verdict follows on a rank that was lost before its process ended.
    if (report(rank_, rank).verdict.why == LostWhy::gone || has_gone(at(rank))) ranks.push_back(rank);
  }
  return ranks;
}

std::string Membership::describe_end(int rank) const {
  return fmt::format("the process of rank {} has ended ({})", rank, describe(at(rank).info));
}

bool Membership::has_left(int rank) const {
  const std::lock_guard lock(plane_->mutex_);
  return at(rank).said.left != Goodbye::none;
}

std::string Membership::describe_leaver() const {
  const std::lock_guard lock(plane_->mutex_);
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_ && at(rank).said.left == Goodbye::alone) return fmt::format("rank {} has left the buffer", rank);
  }
  return {};
}

std::string Membership::describe_missing_call(int rank) const {
  const std::lock_guard lock(plane_->mutex_);
  const std::uint64_t own = load_calls(), theirs = at(rank).said.calls;
  // A rank answers a reported wait with its number of calls, unless it stands still.
  const bool is_known = at(rank).said.left != Goodbye::none || at(rank).heard > at(rank).own.since;
  if (!is_known || theirs >= own) return {};
  return fmt::format("Rank {} has not made the call: it has made {} of this buffer, rank {} has made {}", rank, theirs,
                     rank_, own);
}

void Membership::leave_out(int rank, bool on) {
  const std::lock_guard lock(plane_->mutex_);
  const std::uint16_t now = on ? 1 : 0;
  if (std::exchange(mine(rank).left_out, now) != now) say();
}

void Membership::resume() {
  const std::lock_guard lock(plane_->mutex_);
  ++at(rank_).said.round;
  verdicts_.clear();
  for (Rank& rank : ranks_) {
    rank.lost = kNobody;
    rank.said.of = {};
    rank.own = {.beats = rank.own.beats, .since = time_};
  }
  for (auto* const words : {&words_.lost, &words_.failed, &words_.left}) {
    for (std::uint32_t& word : *words) __atomic_store_n(&word, 0, __ATOMIC_RELAXED);
  }
  __atomic_fetch_add(&words_.changes, 1, __ATOMIC_RELEASE);
  say();
}

void Membership::replace(Bootstrap& bootstrap) {
  const std::vector<ProcessInfo> ranks = all_gather_values(bootstrap, plane_->info(false));
  std::unique_lock lock(plane_->mutex_);
  begin(ranks[0].buffer, ranks);
  plane_->connect(*this, lock);
}

std::string Membership::describe_process(int rank) const {
  return fmt::format("rank {} ({})", rank, describe(at(rank).info));
}

bool Membership::await_end(int rank) const {
  const auto until = Clock::now() + kMostOfAnEnd;
  for (;; std::this_thread::sleep_for(milliseconds(1))) {
    const std::lock_guard lock(plane_->mutex_);
    if (at(rank).said.left != Goodbye::none || has_gone(at(rank))) return true;
    if (Clock::now() > until) return false;
  }
}

// ---- What other ranks say ----

int Report::waits_for() const {
  const auto longest = std::ranges::max_element(of, {}, &PeerReport::waited_ns);
  return longest != of.end() && longest->waited_ns > 0 ? longest->verdict.rank : kNobody;
}

const PeerReport& Report::about(int peer) const {
  static const PeerReport nothing;
  const auto found = std::ranges::find(of, peer, [](const PeerReport& said) { return said.verdict.rank; });
  return found == of.end() ? nothing : *found;
}

PeerReport& Report::about(int peer) {
  const auto found = std::ranges::find(of, peer, [](const PeerReport& said) { return said.verdict.rank; });
  return found == of.end() ? of.emplace_back(PeerReport{.verdict = {.rank = peer}}) : *found;
}

void Report::send(Connection& to) const {
  ReportHead head = *this;
  head.peers = static_cast<std::uint32_t>(of.size());
  const auto bytes = std::as_bytes(std::span(&head, 1));
  to.unsent.insert(to.unsent.end(), bytes.begin(), bytes.end());
  to.send(of.data(), of.size() * sizeof(PeerReport));
}

bool Report::take(Connection& from) {
  ReportHead head;
  if (from.received.size() < sizeof head) return false;
  std::memcpy(&head, from.received.data(), sizeof head);
  if (from.received.size() < sizeof head + head.peers * sizeof(PeerReport)) return false;
  from.take(head);
  *this = {head, std::vector<PeerReport>(head.peers)};
  return from.take_bytes(std::as_writable_bytes(std::span(of)));
}

void Membership::hear(const Token& process, const Report& said) {
  const bool is_alone = std::ranges::count(ranks_, process, [](const Rank& rank) { return rank.info.process; }) == 1;
  for (Rank& rank : ranks_) {
    if (rank.info.process != process) continue;
    const bool is_of_this = said.buffer == report().buffer;
    const bool is_itself = is_of_this && said.rank == &rank - ranks_.data();
    // A rank that waits in another buffer is not silent in this one. Of several it is not known which of them waits.
    if (said.waits != 0 && (is_itself || (!is_of_this && is_alone))) rank.sign = time_;
    // A masked rank may have woken up, or come back from the other half of a network that was cut in two.
    const bool counts = said.round == report().round && (!masks_ || rank.lost == kNobody);
    const Goodbye before = rank.said.left;
    if (is_itself) rank.heard = time_;
    if (is_itself && counts) {
      rank.said = said;
      // Ranks that there are not, by damage or malice.
      std::int32_t& gave_up_on = rank.said.gave_up_on;
      if (gave_up_on < 0 || gave_up_on >= size()) gave_up_on = kNobody;
      std::erase_if(rank.said.of,
                    [&](const PeerReport& one) { return one.verdict.rank < 0 || one.verdict.rank >= size(); });
    }
    if (!is_itself || said.left == Goodbye::none) continue;
    rank.said.left = std::max(before, said.left);  // for good, in whichever round it said so
    const bool is_news = masks_ && before == Goodbye::none && rank.lost == kNobody;
    if (is_news) verdicts_.push_back({.rank = said.rank, .why = LostWhy::left, .by = said.rank});
  }
}

/// Its process has ended, and others may still wait for it in exchanges.
bool Membership::has_gone(const Rank& rank) const {
  if (rank.peer == nullptr || rank.peer->link != Plane::Link::ended || rank.said.left > Goodbye::meets) return false;
  return Clock::now() >= rank.peer->next;
}

// ---- What this rank says ----

void Membership::say(bool waits) {
  at(rank_).said.waits = waits ? 1 : 0;
  std::erase_if(at(rank_).said.of, [](const PeerReport& said) { return said.says_nothing(); });
  plane_->say(*this);
}

void Membership::step(Clock::time_point now) {
  time_ += std::min<Time>(now - looked_, timeout_ / kSteps);
  looked_ = now;
  look_at_words();
  judge();
}

/// Kernels say for whom they wait, and for how long. A rank tells all others when a wait has lasted for an eighth of
/// the time-out, 16 times in a time-out while it lasts, and at once when it has lasted too long.
void Membership::look_at_words() {
  // First: with the end of the calls all that kernels wrote before is seen, too, the reason perhaps.
  const int ended_for = static_cast<int>(__atomic_load_n(&words_.ended, __ATOMIC_ACQUIRE)) - 1;
  bool has_news = std::exchange(at(rank_).said.gave_up_on, ended_for) != ended_for;
  const auto awaits_this = [this](const Rank& rank) { return rank.said.about(rank_).waited_ns != 0; };
  const bool was_awaited = std::exchange(is_awaited_, std::ranges::any_of(ranks_, awaits_this));
  if (is_awaited_) has_news |= std::exchange(at(rank_).said.calls, load_calls()) != load_calls() || !was_awaited;
  bool waits = false;
  for (int peer = 0; peer < size(); ++peer) {
    OwnWait& wait = at(peer).own;
    look_at_wait(wait, peer);
    const bool is_over = time_ - wait.heard > timeout_ / kEndsAfter;
    const Time lasted = is_over ? Time{} : std::min(wait.longest, time_ - wait.since);
    const bool is_reported = lasted >= timeout_ / kBeforeReports || load(words_.failed, peer) != 0;
    if (!is_reported && report(rank_, peer).says_nothing()) continue;
    PeerReport& said = mine(peer);
    const bool was_late = Time(said.waited_ns) >= timeout_;
    has_news |= was_late != (lasted >= timeout_);
    said.waited_ns = lasted >= timeout_ / kBeforeReports ? lasted.count() : 0;
    said.wanted = load(words_.wanted, peer);
    // A report that is due waits for the next beat: beats may come more seldom than reports are due.
    waits |= said.waited_ns != 0 && wait.heard == time_;
    if (load(words_.failed, peer) != 0) has_news |= std::exchange(said.failed, 1) == 0;
  }
  const bool is_due = time_ - reported_ >= timeout_ / kSteps;
  if (!has_news && !(is_due && waits)) return;
  reported_ = time_;
  say(waits);
}

void Membership::look_at_wait(OwnWait& wait, int peer) const {
  const std::uint32_t beats = load(words_.beats, peer);
  if (beats == std::exchange(wait.beats, beats)) return;
  // On a very busy machine beats come so seldom that a long wait seems to be over: the next beat tells.
  const Time so_far(load(words_.waits, peer));
  const bool is_another = wait.longest < timeout_ / kBeforeReports || so_far < wait.longest;
  if (time_ - wait.heard > timeout_ / kEndsAfter && is_another) wait = {.beats = beats, .since = time_};
  if (so_far < wait.longest) return;
  wait.longest = so_far;
  wait.heard = time_;
}

// ---- Verdicts ----

void Membership::judge() {
  const std::size_t before = verdicts_.size();
  // What none has to decide: a rank's end, and what another rank has said.
  for (int rank = 0; rank < size(); ++rank) {
    if (has_gone(at(rank))) lose({.rank = rank, .why = LostWhy::gone, .by = rank_});
    if (masks_ && at(rank).said.gave_up_on != kNobody) lose({.rank = rank, .why = LostWhy::ended, .by = rank});
  }
  for (const Rank& other : ranks_) {
    for (const PeerReport& said : other.said.of) {
      const bool has_left = said.verdict.why == LostWhy::gone && at(said.verdict.rank).said.left > Goodbye::meets;
      if (!has_left) lose(said.verdict);
    }
  }
  for (const LostRank& verdict : decide()) lose(verdict);
  if (verdicts_.size() != before) say();  // before kernels of this rank hear of it
  show();
}

/// The verdicts on ranks that others wait for in vain, if it is this rank's turn to give them.
std::vector<LostRank> Membership::decide() {
  const Evidence evidence = gather();
  std::vector<LostRank> silent = silent_ranks(evidence);
  const std::vector<LostRank> failed = masks_ ? failed_ranks(evidence, PairEnd::peer) : std::vector<LostRank>();
  if (silent.empty() && failed.empty()) {
    blamed_since_ = time_;
    return {};
  }
  // The lowest rank decides, but for these. (One with failed queue pairs may; a silent one may be stopped.) The next
  // one decides if it does not: its thread may stand still, though no rank waits for it.
  int before = 0;
  for (int rank = 0; rank < rank_; ++rank) {
    const bool is_silent = std::ranges::find(silent, rank, &LostRank::rank) != silent.end();
    const bool is_out =
        evidence.ranks[index(rank)].lost || at(rank).said.left != Goodbye::none || report(rank_, rank).left_out != 0;
    before += is_silent || is_out ? 0 : 1;
  }
  const Time turn = before * std::min(timeout_ / kBetweenDeciders, kMostBetweenDeciders);
  if (time_ - blamed_since_ < turn + (silent.empty() ? kToSettle : Time{})) return {};
  for (LostRank& verdict : silent) {
    const PeerReport& wait = report(verdict.by, verdict.rank);
    verdict.wanted = wait.wanted;
    verdict.waited_s = std::chrono::duration<double>(Time(wait.waited_ns)).count();
  }
  silent.insert(silent.end(), failed.begin(), failed.end());
  return silent;
}

void Membership::lose(const LostRank& verdict) {
  if (verdict.why == LostWhy::unknown || report(rank_, verdict.rank).verdict.why != LostWhy::unknown) return;
  if (!masks_ && verdict.rank == rank_) return;  // it knows better, and is about to go on
  mine(verdict.rank).verdict = verdict;
  verdicts_.push_back(verdict);
  // Ranks that have waited themselves may have waited for this one: what they owe begins now.
  for (Rank& rank : ranks_) {
    if (rank.said.waits_for() == kNobody) continue;
    rank.sign = time_;
    for (PeerReport& said : rank.said.of) said.waited_ns = 0;
  }
}

/// Tells this rank's kernels and calls.
void Membership::show() {
  const std::vector<int> ends = ends_of_chains(gather());
  bool changes = false;
  for (int rank = 0; rank < size(); ++rank) {
    const std::uint32_t left = at(rank).said.left != Goodbye::none && rank != rank_ ? 1 : 0;
    if (left > load(words_.left, rank)) {
      changes = true;
      __atomic_store_n(&words_.left[index(rank)], left, __ATOMIC_RELAXED);  // released with `changes`
    }
    const int lost = ends[index(rank)];  // with masks each lost rank itself, as one that has given up is lost, too
    if (std::exchange(at(rank).lost, lost) == lost) continue;
    changes = true;
    __atomic_store_n(&words_.lost[index(rank)], static_cast<std::uint32_t>(lost) + 1, __ATOMIC_RELEASE);
  }
  if (changes) __atomic_fetch_add(&words_.changes, 1, __ATOMIC_RELEASE);
}

Evidence Membership::gather() const {
  Evidence found;
  for (int rank = 0; rank < size(); ++rank) {
    const Rank& one = at(rank);
    found.ranks.push_back({.lost = report(rank_, rank).verdict.why != LostWhy::unknown,
                           .silent = time_ - one.sign >= timeout_,
                           .waits_for = one.said.waits_for(),
                           .gave_up_on = one.said.gave_up_on});
    for (const PeerReport& said : one.said.of) {
      const int peer = said.verdict.rank;
      // A silent rank may have stood still since it said so.
      const bool is_late = !found.ranks.back().silent && Time(said.waited_ns) >= timeout_;
      if (is_late && report(peer, rank).left_out == 0) found.late.push_back({rank, peer});
      if (said.failed != 0) found.failed.push_back({rank, peer});
    }
  }
  return found;
}

}  // namespace deep_ep::control
