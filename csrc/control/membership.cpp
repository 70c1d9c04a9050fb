// A rank's part of a buffer: how it joins and leaves, what it hears of the other ranks, and what follows from that.
#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/control/plane.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::control {
namespace {

constexpr auto kMostOfAGoodbye = std::chrono::seconds(5);

/// Has the system of the other end taken all that was sent?
bool has_arrived(const UniqueFd& tcp_socket) {
  int on_the_way = 0;
  return ::ioctl(tcp_socket.get(), SIOCOUTQ, &on_the_way) == 0 && on_the_way == 0;
}

}  // namespace

std::string describe(const ProcessInfo& info) {
  return fmt::format("process {} on {}", info.pid, info.identity.host.data());
}

std::chrono::nanoseconds JoinOptions::timeout() const {
  constexpr double kMostSeconds = 1e9;  // as in kernels; not all doubles have their nanoseconds in 64 bits
  const std::chrono::duration<double> seconds(std::min(timeout_s, kMostSeconds));
  return std::chrono::duration_cast<std::chrono::nanoseconds>(seconds);
}

std::unique_ptr<Membership> Membership::join(const std::shared_ptr<Plane>& plane, Bootstrap& bootstrap,
                                             const Words& words, const JoinOptions& options) {
  ProcessInfo mine;
  agree(bootstrap, "joining the control plane", [&] { mine = plane->info(false); });
  std::vector<ProcessInfo> ranks = all_gather_values(bootstrap, mine);
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
  const bool by_tcp =
      std::ranges::any_of(ranks, [&](const ProcessInfo& one) { return !plane->reaches_by_unix(ranks.front(), one); });
  if (by_tcp) {
    agree(bootstrap, "opening a port for control connections", [&] { mine = plane->info(true); });
    ranks = all_gather_values(bootstrap, mine);
  }
  std::unique_ptr<Membership> membership;
  agree(bootstrap, "connecting the control plane", [&] {
    membership =
        std::make_unique<Membership>(plane, ranks.front().buffer, bootstrap.rank(), std::span(ranks), words, options);
  });
  return membership;
}

Membership::Membership(std::shared_ptr<Plane> plane, std::uint64_t buffer, int rank, std::span<const ProcessInfo> ranks,
                       const Words& words, const JoinOptions& options)
    : plane_(std::move(plane)),
      buffer_(buffer),
      rank_(rank),
      words_(words),
      masks_(options.masks),
      timeout_(options.timeout()),
      looked_(Clock::now()) {
  for (const ProcessInfo& info : ranks) ranks_.push_back({.info = info, .sign = -timeout_});  // silent so far
  std::unique_lock lock(plane_->mutex_);
  plane_->members_.push_back(this);
  try {
    plane_->connect(*this, lock);
  } catch (...) {
    std::erase(plane_->members_, this);
    throw;
  }
}

Membership::~Membership() {
  leave();
  std::unique_lock lock(plane_->mutex_);
  // This process may be about to end, and a connection to be down: a goodbye that is lost makes the end a death.
  const auto until = Clock::now() + kMostOfAGoodbye;
  const auto may_wait = [&] { return !plane_->home_.left() && !plane_->ending_ && Clock::now() < until; };
  while (may_wait() && std::ranges::any_of(ranks_, [&](const Rank& rank) { return is_to_hear(rank); })) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    lock.lock();
  }
  std::erase(plane_->members_, this);
}

int Membership::lost_for(int rank) const {
  const std::lock_guard lock(plane_->mutex_);
  return rank >= 0 && rank < size() ? at(rank).lost : kNobody;
}

std::vector<int> Membership::gone() const {
  const std::lock_guard lock(plane_->mutex_);
  std::set<int> ranks;
  for (const LostRank& one : known_.verdicts) {
    if (one.why == LostWhy::gone) ranks.insert(one.rank);
  }
  // No verdict follows on a rank that was lost before its process ended.
  for (int rank = 0; rank < size(); ++rank) {
    if (has_gone(at(rank))) ranks.insert(rank);
  }
  return {ranks.begin(), ranks.end()};
}

bool Membership::is_gone(int rank) const {
  const std::vector<int> ranks = gone();
  return std::ranges::find(ranks, rank) != ranks.end();
}

std::string Membership::describe_gone() const {
  std::string text;
  for (const int rank : gone()) text += (text.empty() ? "" : ", ") + describe_end(rank);
  return text;
}

std::string Membership::describe_end(int rank) const {
  return fmt::format("the process of rank {} has ended ({})", rank, describe(at(rank).info));
}

std::vector<LostRank> Membership::lost() const {
  const std::lock_guard lock(plane_->mutex_);
  return known_.verdicts;
}

void Membership::leave_out(int rank, bool on) {
  const std::lock_guard lock(plane_->mutex_);
  if (leaves_out(rank_, rank) != on) tell(MessageType::leaves_out, {.rank = rank}, on);
}

void Membership::leave() {
  const std::lock_guard lock(plane_->mutex_);
  look_for_end();
  if (!at(rank_).left) tell(MessageType::left);
}

std::vector<int> Membership::awaited_at_end() const {
  const std::lock_guard lock(plane_->mutex_);
  if (at(rank_).lost != kNobody) return {};  // the others do not wait, either
  std::vector<int> awaited;
  for (int rank = 0; rank < size(); ++rank) {
    const Rank& one = at(rank);
    if (!one.left && one.lost == kNobody && !leaves_out(rank_, rank)) awaited.push_back(rank);
  }
  return awaited;
}

bool Membership::meet(double most_s) {
  leave();
  const auto begin = Clock::now();
  for (auto nap = std::chrono::milliseconds(1);; nap = std::min(2 * nap, std::chrono::milliseconds(20))) {
    const std::vector<int> awaited = awaited_at_end();
    if (awaited.empty()) return true;
    const std::chrono::duration<double> waited = Clock::now() - begin;
    if (most_s != 0 && waited.count() > most_s) {
      log::warn("buffer: rank {} waited {} s for {} to destroy the buffer, too, and goes alone", rank_, most_s,
                format_ranks(awaited));
      return false;
    }
    std::this_thread::sleep_for(nap);
  }
}

void Membership::resume() {
  const std::lock_guard lock(plane_->mutex_);
  ++round_;
  known_ = {.blamed_since = time_};
  for (Rank& rank : ranks_) {
    rank.lost = kNobody;
    rank.own = {.since = time_};
    rank.facts.gone = false;  // judged again below
  }
  for (const std::span<std::uint32_t> words : {words_.lost, words_.failed}) {
    for (std::uint32_t& word : words) __atomic_store_n(&word, 0, __ATOMIC_RELAXED);
  }
  __atomic_fetch_add(words_.changes, 1, __ATOMIC_RELEASE);
  judge();
  plane_->wake();
}

// ---- What is known of ranks ----

bool Membership::has(const Token& process, bool and_misses) const {
  return std::ranges::any_of(
      ranks_, [&](const Rank& rank) { return rank.info.process == process && !(and_misses && rank.left); });
}

const Plane::Peer* Membership::peer_of(const Rank& rank) const {
  const auto place = plane_->peers_.find(rank.info.process);
  return place != plane_->peers_.end() ? &place->second : nullptr;
}

bool Membership::has_gone(const Rank& rank) const {
  const Plane::Peer* peer = peer_of(rank);
  return peer != nullptr && peer->known && !rank.left;
}

/// It has not heard yet that this rank has left, and may take its end for a death.
bool Membership::is_to_hear(const Rank& rank) const {
  const Plane::Peer* peer = peer_of(rank);
  if (peer == nullptr || peer->by_unix || peer->link == Plane::Link::ended) return false;
  if (rank.left || rank.lost != kNobody) return false;
  return peer->link != Plane::Link::up || !peer->to.unsent.empty() || !has_arrived(peer->to.socket);
}

// ---- Messages ----

void Membership::tell(MessageType type, const LostRank& other, bool flag) {
  Message message{.type = type, .buffer = buffer_, .round = round_, .rank = rank_, .about = other};
  message.flag = flag ? 1 : 0;
  plane_->broadcast(message);
}

void Membership::hear(const Token& process, const Message& message) {
  const bool is_here = buffer_ == message.buffer && message.rank >= 0 && message.rank < size() &&
                       at(message.rank).info.process == process;
  if (is_here) apply(message);
  if (message.type != MessageType::waits || message.about.waited_s == 0) return;
  // A rank that waits in another buffer is not silent in this one. If a process has several ranks of a buffer, the
  // message does not say which of them waits.
  const auto is_of_process = [&](const Rank& rank) { return rank.info.process == process; };
  const bool one_rank = std::ranges::count_if(ranks_, is_of_process) == 1;
  for (Rank& rank : ranks_) {
    const bool itself = is_here && &rank == &at(message.rank);
    if (is_of_process(rank) && (one_rank || itself)) rank.sign = time_;
  }
}

void Membership::apply(const Message& message) {
  Rank& rank = at(message.rank);
  const LostRank& about = message.about;
  const bool is_rank = about.rank >= 0 && about.rank < size();
  const bool is_of_now = is_rank && message.round == round_;
  const RankPair pair{message.rank, about.rank};
  switch (message.type) {
    case MessageType::left:
      rank.left = true;
      break;
    case MessageType::gave_up:
      if (masks_) {
        lose({.rank = message.rank, .why = LostWhy::ended, .by = message.rank});
        break;
      }
      if (rank.facts.gave_up_on != kNobody) break;
      rank.facts.gave_up_on = about.rank;
      if (is_rank) known_.verdicts.push_back({.rank = about.rank, .why = about.why, .by = message.rank});
      judge();
      break;
    case MessageType::waits:
      if (!is_of_now) break;
      rank.waits_for = about.waited_s != 0 ? about.rank : kNobody;
      known_.waits.erase(pair);
      if (about.waited_s != 0) known_.waits[pair] = {about, message.flag != 0, time_};
      break;
    case MessageType::failed:
      if (!is_of_now) break;
      if (known_.failed.empty()) known_.failed_at = time_;
      known_.failed.insert(pair);
      judge();
      break;
    case MessageType::lost:
      // A rank that stood still may have judged before it heard that it is lost itself.
      if (is_of_now && masks_ && (rank.lost == kNobody || about.rank == message.rank)) lose(about);
      break;
    case MessageType::leaves_out:
      if (!is_of_now) break;
      if (message.flag != 0) {
        known_.left_out.insert(pair);
      } else {  // what that rank owes begins now
        known_.left_out.erase(pair);
        known_.waits.erase({about.rank, message.rank});
        rank.sign = time_;
      }
      break;
    case MessageType::ended:
      break;  // of processes, not of ranks
  }
}

// ---- Verdicts ----

void Membership::judge() {
  for (int rank = 0; rank < size(); ++rank) {
    if (at(rank).facts.gone || !has_gone(at(rank))) continue;
    at(rank).facts.gone = true;
    const LostRank verdict{.rank = rank, .why = LostWhy::gone, .by = rank_};
    if (masks_) {
      lose(verdict);
    } else {
      add(verdict);
    }
  }
  if (masks_) return;
  std::vector<RankFacts> facts;
  for (const Rank& rank : ranks_) facts.push_back(rank.facts);
  const std::vector<int> lost = control::judge(facts, std::vector(known_.failed.begin(), known_.failed.end()));
  if (std::ranges::equal(lost, ranks_, {}, {}, &Rank::lost)) return;
  for (int rank = 0; rank < size(); ++rank) {
    const int because = at(rank).lost = lost[static_cast<std::size_t>(rank)];
    if (because != kNobody && rank != rank_) show_lost(rank, because);
  }
  __atomic_fetch_add(words_.changes, 1, __ATOMIC_RELEASE);
}

void Membership::add(const LostRank& verdict) {
  known_.verdicts.push_back(verdict);
  // Ranks that have waited themselves may have waited for this one: what they owe begins now.
  for (Rank& rank : ranks_) {
    if (std::exchange(rank.waits_for, kNobody) != kNobody) rank.sign = time_;
  }
}

/// With masks.
void Membership::lose(const LostRank& verdict) {
  if (at(verdict.rank).lost != kNobody) return;
  at(verdict.rank).lost = verdict.rank;
  add(verdict);
  std::erase_if(known_.failed,
                [&](const RankPair& pair) { return pair.rank == verdict.rank || pair.peer == verdict.rank; });
  tell(MessageType::lost, verdict);  // before this rank's own kernels hear of it
  const bool is_own = verdict.rank == rank_;
  show_lost(verdict.rank, is_own && verdict.by != kNobody ? verdict.by : verdict.rank);
  __atomic_fetch_add(words_.changes, 1, __ATOMIC_RELEASE);
}

void Membership::show_lost(int rank, int because) {
  std::uint32_t& word = words_.lost[static_cast<std::size_t>(rank)];
  __atomic_store_n(&word, static_cast<std::uint32_t>(because) + 1, __ATOMIC_RELEASE);
}

void Membership::look_for_end() {
  if (known_.told) return;
  const int peer = static_cast<int>(__atomic_load_n(words_.ended, __ATOMIC_ACQUIRE)) - 1;
  if (peer == kNobody) return;
  look_for_failures();  // first: others hear of a failed queue pair before they hear that this rank gave up
  known_.told = true;
  LostRank other{.rank = peer};
  for (const LostRank& one : known_.verdicts) {
    if (one.rank == peer && one.why != LostWhy::unknown) other.why = one.why;
  }
  tell(MessageType::gave_up, other);
}

}  // namespace deep_ep::control
