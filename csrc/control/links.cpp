// The part of the control thread that keeps connections: calls, callers, and evidence that a process has ended.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "csrc/control/plane.hpp"

namespace deep_ep::control {
namespace {

using std::chrono::milliseconds;

constexpr auto kMostOfACall = milliseconds(3000);  ///< an address that nobody has does not answer at all
constexpr auto kBetweenCalls = milliseconds(50);
constexpr auto kBetweenProbes = milliseconds(500);  ///< of a process that lives, but has not called again
constexpr auto kMostOfAHello = milliseconds(5000);
constexpr auto kMostOfAJoiner = milliseconds(60000);  ///< it shows the token, but this process does not know it yet
/// In this time the data that a process sent before it ended arrives, also from its NIC.
constexpr auto kToArrive = milliseconds(20);
constexpr std::size_t kMostCallers = 64;
constexpr int kMostAccepted = 64;  ///< at a time: others want to be received, too
constexpr int kRefusalsOfTheDead = 2;
constexpr auto kRefusedAtLeast = milliseconds(400);  ///< a firewall that is loaded anew refuses for a moment, too
constexpr auto kWithoutDescriptors = milliseconds(100);
constexpr std::size_t kMostUnsent = std::size_t{64} << 10;
constexpr std::size_t kMostRecent = 256;

/// Has the caller gone already?
bool has_ended_there(int socket) {
  std::byte first{};
  return ::recv(socket, &first, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

int in_ms(std::chrono::steady_clock::duration duration) {
  return static_cast<int>(std::max<std::int64_t>(0, std::chrono::ceil<milliseconds>(duration).count()));
}

}  // namespace

void Plane::step(Clock::time_point now) {
  for (auto& [process, peer] : peers_) {
    if (peer.ended) {
      if (peer.known || now < peer.ended_at + kToArrive) continue;
      peer.known = true;
      for (Member& member : members_) judge_member(member);
    } else if (peer.link == Link::connecting || peer.link == Link::greeting) {
      if (now >= peer.next && !has_no_limit(peer)) failed(peer, ETIMEDOUT, now);
    } else if (peer.link == Link::none && now >= peer.next && (peer.calls || (peer.was_up && peer.reachable))) {
      call(peer, now);
    }
  }
  std::erase_if(peers_, [&](const auto& one) {
    const auto sits = [&](const Member& member) { return member.has(one.first); };
    return one.second.known && std::ranges::none_of(members_, sits);
  });
  callers_.remove_if([&](Caller& one) { return now >= one.until || (one.trusted && attach(one)); });
  for (Member& member : members_) {
    look_for_end(member);
    look_at_waits(member, now);
  }
}

int Plane::next_step_ms(Clock::time_point now) const {
  int next = 60000;
  const auto at = [&](Clock::time_point moment) { next = std::min(next, in_ms(moment - now)); };
  for (const auto& [process, peer] : peers_) {
    if (peer.ended && !peer.known) at(peer.ended_at + kToArrive);
    if (!peer.ended && peer.link != Link::up && (peer.calls || peer.was_up) && !has_no_limit(peer)) at(peer.next);
  }
  for (const Caller& one : callers_) at(one.until);
  if (listens_again_ > now) at(listens_again_);
  for (const Member& member : members_) {
    if (member.watches()) at(member.looked + between_looks(member));
    // Other ranks may wait for this rank: they must hear at once that its wait has ended. After 10 s nothing is urgent.
    const bool urgent = !member.told && !member.options.masks && member.since != Clock::time_point{};
    if (urgent) next = std::min(next, now - member.since < std::chrono::seconds(10) ? 2 : 50);
  }
  return next;
}

// ---- Calls ----
void Plane::call(Peer& peer, Clock::time_point now) {
  peer.socket = peer.by_unix ? call_by_unix(peer.info.process) : call_by_tcp(peer.info.tcp[peer.address], tcp_.choice);
  if (!peer.socket) return failed(peer, errno, now);
  peer.link = Link::connecting;
  peer.next = now + kMostOfACall;
}

void Plane::connected(Peer& peer, Clock::time_point now) {
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(peer.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return failed(peer, error, now);
  peer.refusals = 0;
  if (!peer.calls) {  // it lives, and calls again itself
    peer.socket = {};
    peer.link = Link::none;
    peer.next = now + kBetweenProbes;
    return;
  }
  peer.link = Link::greeting;
  const Hello hello{.secret = peer.info.secret, .from = process_};
  send(peer, &hello, sizeof hello);
}

void Plane::probe(Peer& peer) {
  while (!peer.probe && peer.address < peer.info.tcp.size() && peer.info.tcp[peer.address].size != 0) {
    peer.probe = call_by_tcp(peer.info.tcp[peer.address], tcp_.choice);
    if (!peer.probe) ++peer.address;
  }
}

void Plane::probed(Peer& peer) {
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(peer.probe.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  peer.probe = {};
  peer.reachable = error == 0;
  if (peer.reachable) return;
  ++peer.address;
  probe(peer);
}

void Plane::failed(Peer& peer, int error, Clock::time_point now) {
  peer.socket = {};
  peer.received.clear();
  peer.unsent.clear();
  peer.link = Link::none;
  peer.error = error;
  peer.next = now + kBetweenCalls;
  if (peer.was_up) {
    // By an address that it had been reached at: step() calls no other, which may be one of another machine.
    const bool refused = error == ECONNREFUSED;
    if (refused && peer.refusals == 0) peer.refused_since = now;
    peer.refusals = refused ? peer.refusals + 1 : 0;
    if (peer.refusals >= kRefusalsOfTheDead && now - peer.refused_since >= kRefusedAtLeast) has_ended(peer, false);
    return;
  }
  const std::size_t next = peer.address + 1;
  peer.address = next < peer.info.tcp.size() && peer.info.tcp[next].size != 0 ? next : 0;
}

void Plane::up(Peer& peer) {
  if (!peer.by_unix) keep_alive(peer.socket.get());
  peer.link = Link::up;
  if (std::exchange(peer.was_up, true)) {
    for (const Message& message : recent_) send(peer, &message, sizeof message);
  }
}

void Plane::send(Peer& peer, const void* bytes, std::size_t size) {
  const auto* begin = static_cast<const std::byte*>(bytes);
  if (peer.unsent.size() + size <= kMostUnsent && size != 0) peer.unsent.insert(peer.unsent.end(), begin, begin + size);
  const ssize_t sent = ::send(peer.socket.get(), peer.unsent.data(), peer.unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  // read() finds out that a connection is broken.
  if (sent > 0) peer.unsent.erase(peer.unsent.begin(), peer.unsent.begin() + sent);
}

void Plane::read(Peer& peer) {
  std::array<std::byte, 4096> bytes;
  while (peer.socket) {
    const ssize_t got = ::recv(peer.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) {
      take(peer, {bytes.data(), static_cast<std::size_t>(got)});
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      return disconnected(peer);
    } else if (errno == EAGAIN) {
      return;
    }
  }
}

void Plane::take(Peer& peer, std::span<const std::byte> bytes) {
  peer.received.insert(peer.received.end(), bytes.begin(), bytes.end());
  std::size_t at = 0;
  const auto next = [&](auto& value) {
    if (peer.received.size() - at < sizeof value) return false;
    std::memcpy(&value, peer.received.data() + at, sizeof value);
    at += sizeof value;
    return true;
  };
  if (peer.link == Link::greeting) {
    Hello hello;
    if (!next(hello)) return;
    if (!hello.well_formed() || !(hello.secret == secret_) || !(hello.from == peer.info.process)) {
      return failed(peer, EPROTO, Clock::now());
    }
    up(peer);
  }
  for (Message message; next(message);) {
    if (!message.well_formed()) return disconnected(peer);
    handle_message(peer, message);
  }
  peer.received.erase(peer.received.begin(), peer.received.begin() + static_cast<std::ptrdiff_t>(at));
}

void Plane::disconnected(Peer& peer) {
  const bool was_up = peer.link == Link::up;
  failed(peer, ECONNRESET, Clock::now());
  // Nothing but the end of a process closes a connection within a host.
  if (was_up && peer.by_unix) has_ended(peer, true);
}

void Plane::has_ended(Peer& peer, bool seen_here) {
  if (std::exchange(peer.ended, true)) return;
  peer.ended_at = Clock::now();
  peer.socket = {};
  peer.probe = {};
  peer.process = {};
  peer.link = Link::none;
  if (!seen_here) return;
  // Others cannot see it. No rank needs to hear of a process whose ranks have said goodbye.
  const bool misses = std::ranges::any_of(members_, [&](const Member& member) {
    const auto misses_it = [&](const Rank& rank) { return rank.process == peer.info.process && !rank.left; };
    return std::ranges::any_of(member.ranks, misses_it);
  });
  if (misses) broadcast({.type = MessageType::ended, .rank = kNobody, .process = peer.info.process});
}

// ---- Callers ----
void Plane::accept_from(int listener, bool by_unix) {
  for (int accepted = 0; accepted < kMostAccepted; ++accepted) {
    UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE) listens_again_ = Clock::now() + kWithoutDescriptors;
      return;
    }
    if (by_unix && !is_of_this_user(socket.get())) continue;
    // A flood pushes out those that have been silent for longest. A process of the job speaks at once.
    if (callers_.size() >= kMostCallers) {
      const auto silent = std::ranges::find_if(callers_, [](const Caller& one) { return !one.trusted; });
      if (silent == callers_.end()) continue;
      callers_.erase(silent);
    }
    Caller& caller = callers_.emplace_back();
    caller.socket = std::move(socket);
    caller.until = Clock::now() + kMostOfAHello;
    caller.by_unix = by_unix;
    if (!read_hello(caller)) callers_.pop_back();
  }
}

bool Plane::read_hello(Caller& caller) {
  auto* bytes = reinterpret_cast<std::byte*>(&caller.hello);
  while (caller.received < sizeof caller.hello) {
    const ssize_t got =
        ::recv(caller.socket.get(), bytes + caller.received, sizeof caller.hello - caller.received, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0) return false;
    caller.received += static_cast<std::size_t>(got);
  }
  if (!caller.hello.well_formed() || !(caller.hello.secret == secret_)) return false;
  caller.trusted = true;
  caller.until = Clock::now() + kMostOfAJoiner;
  return !attach(caller);
}

bool Plane::attach(Caller& caller) {
  const auto place = peers_.find(caller.hello.from);
  if (place == peers_.end()) return false;
  Peer& peer = place->second;
  if (peer.ended || peer.calls || peer.by_unix != caller.by_unix) return true;
  if (has_ended_there(caller.socket.get())) return true;
  if (peer.link == Link::up) read(peer);  // its messages from before it called again
  if (peer.ended) return true;
  peer.received.clear();
  peer.unsent.clear();
  peer.socket = std::move(caller.socket);
  const Hello hello{.secret = peer.info.secret, .from = process_};
  send(peer, &hello, sizeof hello);
  up(peer);
  if (!peer.by_unix && !peer.reachable) probe(peer);
  return true;
}

// ---- Evidence and verdict ----
void Plane::handle_message(const Peer& from, const Message& message) {
  if (message.type == MessageType::ended) {
    const auto place = peers_.find(message.process);
    if (place != peers_.end() && from.info.identity.same_host(place->second.info.identity)) {
      has_ended(place->second, false);
    }
    return;
  }
  apply(from.info.process, message);
}

void Plane::apply(const Token& process, const Message& message) {
  for (Member& member : members_) {
    if (member.buffer != message.buffer || message.rank < 0 || message.rank >= member.size()) continue;
    if (member.at(message.rank).process == process) apply_to(member, message);
  }
  if (message.type == MessageType::waits && message.ns != 0) show_sign(process, message);
}

void Plane::apply_to(Member& member, const Message& message) {
  Rank& rank = member.at(message.rank);
  const bool is_rank = message.peer >= 0 && message.peer < member.size();
  const bool is_of_now = is_rank && message.round == member.round;
  if (is_rank && message.round > member.round && message.type != MessageType::waits) {
    if (member.early.size() < kMostRecent) member.early.push_back(message);  // this rank is about to resume, too
    return;
  }
  const RankPair pair{message.rank, message.peer};
  switch (message.type) {
    case MessageType::left:
      rank.left = true;
      break;
    case MessageType::arrived:
      rank.arrived = true;
      break;
    case MessageType::gave_up:
      if (member.options.masks) {
        lose(member, {.rank = message.rank, .why = LostWhy::ended, .by = message.rank});
        break;
      }
      if (rank.facts.gave_up_on != kNobody) break;
      rank.facts.gave_up_on = message.peer;
      if (is_rank) member.verdicts.push_back({.rank = message.peer, .why = LostWhy{message.why}, .by = message.rank});
      judge_member(member);
      break;
    case MessageType::waits:
      if (is_of_now) hear_of_wait(member, message);
      break;
    case MessageType::failed:
      if (!is_of_now || std::ranges::find(member.failed, pair) != member.failed.end()) break;
      if (member.failed.empty()) member.failed_at = member.time;
      member.failed.push_back(pair);
      judge_member(member);
      break;
    case MessageType::lost:
      // A rank that stood still may have judged before it heard that it is lost itself.
      if (!is_of_now || !member.options.masks || (rank.lost != kNobody && message.peer != message.rank)) break;
      lose(member, {.rank = message.peer,
                    .why = LostWhy{message.why},
                    .by = message.by,
                    .wanted = message.wanted,
                    .waited_s = static_cast<double>(message.ns) * 1e-9});
      break;
    case MessageType::leaves_out:
      if (!is_of_now) break;
      std::erase_if(member.left_out, [&](const RankPair& one) { return one == pair; });
      if (message.flag != 0) {
        member.left_out.push_back(pair);
      } else {  // what that rank owes begins now
        rank.sign = member.time;
        std::erase_if(member.waits,
                      [&](const TheirWait& wait) { return wait.rank == message.peer && wait.peer == message.rank; });
      }
      break;
    case MessageType::ended:
      break;  // of processes, not of ranks
  }
}

void Plane::broadcast(const Message& message) {
  if (message.type != MessageType::waits) {  // these are repeated while the wait lasts
    if (recent_.size() >= kMostRecent) {
      const auto least = std::ranges::find(recent_, MessageType::leaves_out, &Message::type);
      recent_.erase(least == recent_.end() ? recent_.begin() : least);
    }
    recent_.push_back(message);
  }
  for (auto& [process, peer] : peers_) {
    if (peer.link != Link::up) continue;
    send(peer, &message, sizeof message);
    if (!peer.unsent.empty()) wake();  // the thread sends the rest
  }
  apply(process_, message);  // this rank, and others that are threads of this process
}

bool Plane::is_gone(const Rank& rank) const {
  const auto place = peers_.find(rank.process);
  return place != peers_.end() && place->second.known && !rank.left;
}

void Plane::judge_member(Member& member) {
  for (int rank = 0; rank < member.size(); ++rank) {
    if (member.at(rank).facts.gone || !is_gone(member.at(rank))) continue;
    member.at(rank).facts.gone = true;
    const LostRank verdict{.rank = rank, .why = LostWhy::gone, .by = member.rank};
    if (member.options.masks) {
      lose(member, verdict);
    } else {
      member.verdicts.push_back(verdict);
    }
  }
  if (member.options.masks) return;
  std::vector<RankFacts> facts;
  for (const Rank& rank : member.ranks) facts.push_back(rank.facts);
  const std::vector<int> lost = judge(facts, member.failed);
  if (std::ranges::equal(lost, member.ranks, {}, {}, &Rank::lost)) return;
  for (int rank = 0; rank < member.size(); ++rank) {
    const int because = member.at(rank).lost = lost[static_cast<std::size_t>(rank)];
    if (because != kNobody && rank != member.rank) show_lost(member, rank, because);
  }
  if (member.words.changes != nullptr) __atomic_fetch_add(member.words.changes, 1, __ATOMIC_RELEASE);
}

void Plane::show_lost(Member& member, int rank, int because) {
  if (member.since == Clock::time_point{}) member.since = Clock::now();
  if (member.words.lost.empty()) return;
  std::uint32_t& word = member.words.lost[static_cast<std::size_t>(rank)];
  __atomic_store_n(&word, static_cast<std::uint32_t>(because) + 1, __ATOMIC_RELEASE);
}

void Plane::look_for_end(Member& member) {
  if (member.told || member.words.ended == nullptr) return;
  const int peer = static_cast<int>(__atomic_load_n(member.words.ended, __ATOMIC_ACQUIRE)) - 1;
  if (peer == kNobody) return;
  look_for_failures(member);  // first: others hear of a failed queue pair before they hear that this rank gave up
  member.told = true;
  Message message = about(member, MessageType::gave_up);
  message.peer = peer;
  for (const LostRank& one : member.verdicts) {
    if (one.rank == peer && one.why != LostWhy::unknown) message.why = static_cast<std::uint32_t>(one.why);
  }
  broadcast(message);
}

}  // namespace deep_ep::control
