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
constexpr std::size_t kMostStrangers = 64;
constexpr int kMostAccepted = 64;  ///< at a time: others want to be heard, too
constexpr int kRefusalsOfTheDead = 2;
constexpr auto kRefusedAtLeast = milliseconds(400);  ///< a firewall that is loaded anew refuses for a moment, too
constexpr auto kWithoutDescriptors = milliseconds(100);
constexpr std::size_t kMostUnsent = std::size_t{64} << 10;
constexpr std::size_t kMostSaid = 256;

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
      for (Seat& seat : seats_) judge_again(seat);
    } else if (peer.link == Link::connecting || peer.link == Link::greeting) {
      if (now >= peer.next && !has_no_limit(peer)) failed(peer, ETIMEDOUT, now);
    } else if (peer.link == Link::none && now >= peer.next && (peer.calls || (peer.was_up && peer.reachable))) {
      call(peer, now);
    }
  }
  std::erase_if(peers_, [&](const auto& one) {
    const auto sits = [&](const Seat& seat) {
      return std::ranges::find(seat.processes, one.first) != seat.processes.end();
    };
    return one.second.known && std::ranges::none_of(seats_, sits);
  });
  strangers_.remove_if([&](Stranger& one) { return now >= one.until || (one.trusted && adopt(one)); });
  for (Seat& seat : seats_) look_for_end(seat);
}

int Plane::next_step_ms(Clock::time_point now) const {
  int next = 60000;
  const auto at = [&](Clock::time_point moment) { next = std::min(next, in_ms(moment - now)); };
  for (const auto& [process, peer] : peers_) {
    if (peer.ended && !peer.known) at(peer.ended_at + kToArrive);
    if (!peer.ended && peer.link != Link::up && (peer.calls || peer.was_up) && !has_no_limit(peer)) at(peer.next);
  }
  for (const Stranger& one : strangers_) at(one.until);
  if (listens_again_ > now) at(listens_again_);
  for (const Seat& seat : seats_) {
    // Other ranks may wait for this rank: they must hear at once that its wait has ended. After 10 s nothing is urgent.
    const bool watches = !seat.told && seat.since != Clock::time_point{};
    if (watches) next = std::min(next, now - seat.since < std::chrono::seconds(10) ? 2 : 50);
  }
  return next;
}

// ---- Calls ----
void Plane::call(Peer& peer, Clock::time_point now) {
  peer.socket = peer.by_unix ? call_by_unix(peer.card.process) : call_by_tcp(peer.card.tcp[peer.address], tcp_.choice);
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
  const Hello hello{.secret = peer.card.secret, .from = process_};
  send(peer, &hello, sizeof hello);
}

void Plane::probe(Peer& peer) {
  while (!peer.probe && peer.address < peer.card.tcp.size() && peer.card.tcp[peer.address].size != 0) {
    peer.probe = call_by_tcp(peer.card.tcp[peer.address], tcp_.choice);
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
  peer.heard.clear();
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
  peer.address = next < peer.card.tcp.size() && peer.card.tcp[next].size != 0 ? next : 0;
}

void Plane::up(Peer& peer) {
  if (!peer.by_unix) keep_alive(peer.socket.get());
  peer.link = Link::up;
  if (std::exchange(peer.was_up, true)) {
    for (const Message& message : said_) send(peer, &message, sizeof message);
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
  peer.heard.insert(peer.heard.end(), bytes.begin(), bytes.end());
  std::size_t at = 0;
  const auto next = [&](auto& value) {
    if (peer.heard.size() - at < sizeof value) return false;
    std::memcpy(&value, peer.heard.data() + at, sizeof value);
    at += sizeof value;
    return true;
  };
  if (peer.link == Link::greeting) {
    Hello hello;
    if (!next(hello)) return;
    if (!hello.well_formed() || !(hello.secret == secret_) || !(hello.from == peer.card.process)) {
      return failed(peer, EPROTO, Clock::now());
    }
    up(peer);
  }
  for (Message message; next(message);) {
    if (!message.well_formed()) return disconnected(peer);
    obey(peer, message);
  }
  peer.heard.erase(peer.heard.begin(), peer.heard.begin() + static_cast<std::ptrdiff_t>(at));
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
  // Others cannot see it. Nobody needs to hear of a process whose ranks have said goodbye.
  const bool misses = std::ranges::any_of(seats_, [&](const Seat& seat) {
    for (std::size_t rank = 0; rank < seat.processes.size(); ++rank) {
      if (seat.processes[rank] == peer.card.process && !seat.left[rank]) return true;
    }
    return false;
  });
  if (misses) say({.say = Say::ended, .process = peer.card.process});
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
    if (strangers_.size() >= kMostStrangers) {
      const auto silent = std::ranges::find_if(strangers_, [](const Stranger& one) { return !one.trusted; });
      if (silent == strangers_.end()) continue;
      strangers_.erase(silent);
    }
    Stranger& stranger = strangers_.emplace_back();
    stranger.socket = std::move(socket);
    stranger.until = Clock::now() + kMostOfAHello;
    stranger.by_unix = by_unix;
    if (!hear(stranger)) strangers_.pop_back();
  }
}

bool Plane::hear(Stranger& stranger) {
  auto* bytes = reinterpret_cast<std::byte*>(&stranger.hello);
  while (stranger.heard < sizeof stranger.hello) {
    const ssize_t got =
        ::recv(stranger.socket.get(), bytes + stranger.heard, sizeof stranger.hello - stranger.heard, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0) return false;
    stranger.heard += static_cast<std::size_t>(got);
  }
  if (!stranger.hello.well_formed() || !(stranger.hello.secret == secret_)) return false;
  stranger.trusted = true;
  stranger.until = Clock::now() + kMostOfAJoiner;
  return !adopt(stranger);
}

bool Plane::adopt(Stranger& stranger) {
  const auto place = peers_.find(stranger.hello.from);
  if (place == peers_.end()) return false;
  Peer& peer = place->second;
  if (peer.ended || peer.calls || peer.by_unix != stranger.by_unix) return true;
  if (has_ended_there(stranger.socket.get())) return true;
  if (peer.link == Link::up) read(peer);  // its words from before it called again
  if (peer.ended) return true;
  peer.heard.clear();
  peer.unsent.clear();
  peer.socket = std::move(stranger.socket);
  const Hello hello{.secret = peer.card.secret, .from = process_};
  send(peer, &hello, sizeof hello);
  up(peer);
  if (!peer.by_unix && !peer.reachable) probe(peer);
  return true;
}

// ---- Evidence and verdict ----
void Plane::obey(const Peer& from, const Message& message) {
  if (message.say == Say::ended) {
    const auto place = peers_.find(message.process);
    if (place != peers_.end() && from.card.identity.same_host(place->second.card.identity)) {
      has_ended(place->second, false);
    }
    return;
  }
  note(from.card.process, message);
}

void Plane::note(const Token& process, const Message& message) {
  for (Seat& seat : seats_) {
    const auto rank = static_cast<std::size_t>(message.rank);
    if (seat.buffer != message.buffer || rank >= seat.processes.size()) continue;
    if (!(seat.processes[rank] == process)) continue;
    if (message.say == Say::left) seat.left[rank] = true;
    if (message.say == Say::gave_up && seat.facts[rank].gave_up_on == kNobody) {
      seat.facts[rank].gave_up_on = message.peer;
      judge_again(seat);
    }
  }
}

void Plane::say(const Message& message) {
  if (said_.size() >= kMostSaid) said_.erase(said_.begin());
  said_.push_back(message);
  for (auto& [process, peer] : peers_) {
    if (peer.link == Link::up) send(peer, &message, sizeof message);
  }
  note(process_, message);  // other ranks that are threads of this process
}

void Plane::judge_again(Seat& seat) {
  for (std::size_t rank = 0; rank < seat.processes.size(); ++rank) {
    const auto place = peers_.find(seat.processes[rank]);
    if (place != peers_.end() && place->second.known && !seat.left[rank]) seat.facts[rank].gone = true;
  }
  const std::vector<int> lost = judge(seat.facts);
  if (lost == seat.lost) return;
  seat.lost = lost;
  if (seat.since == Clock::time_point{}) seat.since = Clock::now();
  for (std::size_t rank = 0; rank < lost.size(); ++rank) {
    if (lost[rank] == kNobody || static_cast<int>(rank) == seat.rank || seat.words.lost.empty()) continue;
    __atomic_store_n(&seat.words.lost[rank], static_cast<std::uint32_t>(lost[rank]) + 1, __ATOMIC_RELEASE);
  }
  if (seat.words.changes != nullptr) __atomic_fetch_add(seat.words.changes, 1, __ATOMIC_RELEASE);
}

void Plane::look_for_end(Seat& seat) {
  if (seat.told || seat.words.ended == nullptr || seat.since == Clock::time_point{}) return;
  const std::uint32_t ended = __atomic_load_n(seat.words.ended, __ATOMIC_ACQUIRE);
  if (ended == 0) return;
  seat.told = true;
  say({.say = Say::gave_up, .buffer = seat.buffer, .rank = seat.rank, .peer = static_cast<std::int32_t>(ended) - 1});
}

}  // namespace deep_ep::control
