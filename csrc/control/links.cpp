// The part of the control thread that keeps connections: calls, callers, and evidence that a process has ended.
#include <poll.h>
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
constexpr auto kMostOfAProbe = milliseconds(500);  ///< meanwhile the other process waits
constexpr auto kBetweenCalls = milliseconds(50);
constexpr auto kBetweenProbes = milliseconds(500);  ///< of a process that lives, but has not called again
constexpr auto kMostOfAHello = milliseconds(5000);
constexpr auto kMostOfAJoiner = milliseconds(60000);  ///< it shows the token, but this process does not know it yet
/// In this time the data that a process sent before it ended arrives, also from its NIC.
constexpr auto kToArrive = milliseconds(20);
constexpr std::size_t kMostCallers = 64;
constexpr int kMostAccepted = 64;                    ///< at a time: others want to be received, too
constexpr auto kRefusedAtLeast = milliseconds(400);  ///< a firewall that is loaded anew refuses for a moment, too
constexpr auto kWithoutDescriptors = milliseconds(100);
constexpr std::size_t kMostUnsent = std::size_t{64} << 10;
constexpr std::size_t kMostRecent = 256;

/// Has the caller gone already?
bool has_ended_there(int socket) {
  std::byte first{};
  return ::recv(socket, &first, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

}  // namespace

Plane::Clock::time_point Plane::step(Clock::time_point now) {
  Clock::time_point next = now + std::chrono::seconds(60);
  const auto is_due = [&](Clock::time_point when) {
    next = std::min(next, std::max(when, now));
    return when <= now;
  };
  for (auto& [process, peer] : peers_) {
    if (peer.link == Link::ended) {
      if (peer.known || !is_due(peer.next)) continue;
      peer.known = true;
      for (Membership* member : members_) member->judge();
    } else if (peer.link == Link::none) {
      if (may_call(peer) && is_due(peer.next)) call(peer);
    } else if (peer.link != Link::up) {
      // A process of this host answers when it comes to it; another call would look like the end of this process.
      const bool has_no_limit = peer.by_unix && peer.link == Link::greeting;
      if (!has_no_limit && is_due(peer.next)) failed(peer, ETIMEDOUT);
    }
  }
  std::erase_if(peers_, [&](const auto& one) {
    const auto sits = [&](const Membership* member) { return member->has(one.first); };
    return one.second.known && std::ranges::none_of(members_, sits);
  });
  callers_.remove_if([&](Caller& one) { return is_due(one.until) || (one.trusted && attach(one)); });
  if (listens_again_ > now) is_due(listens_again_);
  for (Membership* member : members_) is_due(member->step(now));
  return next;
}

// ---- Calls ----

/// A process that is called calls the other one, too, over TCP: once before they are connected, to see by which address
/// it can be reached; and when their connection is down, to see whether it still can.
bool Plane::may_call(const Peer& peer) {
  if (peer.calls) return true;
  return !peer.by_unix && (peer.answered ? peer.was_up : peer.has_address());
}

void Plane::call(Peer& peer) {
  peer.socket = peer.by_unix ? call_by_unix(peer.info.process) : call_by_tcp(peer.info.tcp[peer.address], tcp_.choice);
  if (!peer.socket) return failed(peer, errno);
  set_link(peer, Link::connecting, peer.calls ? kMostOfACall : kMostOfAProbe);
}

void Plane::serve(Peer& peer, int events) {
  if (peer.link == Link::connecting) return connected(peer);
  if ((events & POLLOUT) != 0) send(peer, nullptr, 0);
  read(peer);
}

void Plane::connected(Peer& peer) {
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(peer.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return failed(peer, error);
  peer.refused_since.reset();
  peer.answered = true;
  if (!peer.calls) return set_link(peer, Link::none, kBetweenProbes);  // it lives, and calls again itself
  set_link(peer, Link::greeting, kMostOfACall);
  const Hello hello{.secret = peer.info.secret, .from = process_};
  send(peer, &hello, sizeof hello);
}

void Plane::failed(Peer& peer, int error) {
  // Nothing but the end of a process closes a connection within a host.
  if (peer.link == Link::up && peer.by_unix) return has_ended(peer, true);
  set_link(peer, Link::none, kBetweenCalls);
  peer.error = error;
  if (!peer.was_up || !peer.answered) {
    ++peer.address;
    if (peer.calls && !peer.has_address()) peer.address = 0;
  } else if (error != ECONNREFUSED) {
    peer.refused_since.reset();
  } else if (!peer.refused_since) {
    peer.refused_since = Clock::now();
  } else if (Clock::now() - *peer.refused_since >= kRefusedAtLeast) {
    has_ended(peer, false);
  }
}

void Plane::set_link(Peer& peer, Link link, Clock::duration until_next) {
  peer.link = link;
  peer.next = Clock::now() + until_next;
  if (link == Link::none || link == Link::ended) {
    peer.socket = {};
    peer.received.clear();
    peer.unsent.clear();
  }
  if (link != Link::up) return;
  if (!peer.by_unix) keep_alive(peer.socket.get());
  if (!std::exchange(peer.was_up, true)) return;
  for (const Message& message : recent_) send(peer, &message, sizeof message);
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
      return failed(peer, ECONNRESET);
    } else if (errno == EAGAIN) {
      return;
    }
  }
}

void Plane::take(Peer& peer, std::span<const std::byte> bytes) {
  std::vector<std::byte> all = std::exchange(peer.received, {});
  all.insert(all.end(), bytes.begin(), bytes.end());
  std::size_t at = 0;
  const auto next = [&](auto& value) {
    if (all.size() - at < sizeof value) return false;
    std::memcpy(&value, all.data() + at, sizeof value);
    at += sizeof value;
    return true;
  };
  Hello hello;
  if (peer.link == Link::greeting && next(hello)) {
    if (!hello.shows(secret_) || !(hello.from == peer.info.process)) return failed(peer, EPROTO);
    set_link(peer, Link::up);
  }
  if (peer.link == Link::up) {
    for (Message message; next(message);) {
      if (!message.well_formed()) return failed(peer, EPROTO);
      apply(peer.info.process, message);
    }
  }
  if (peer.socket) peer.received.assign(all.begin() + static_cast<std::ptrdiff_t>(at), all.end());
}

void Plane::has_ended(Peer& peer, bool seen_here) {
  if (peer.link == Link::ended) return;
  set_link(peer, Link::ended, kToArrive);
  peer.process = {};
  // Others cannot see it. No rank needs to hear of a process whose ranks have said goodbye.
  const auto misses = [&](const Membership* member) { return member->has(peer.info.process, true); };
  if (!seen_here || std::ranges::none_of(members_, misses)) return;
  broadcast({.type = MessageType::ended, .rank = kNobody, .process = peer.info.process});
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
    callers_.push_back({.socket = std::move(socket), .by_unix = by_unix, .until = Clock::now() + kMostOfAHello});
    read_hello(callers_.back());
  }
}

void Plane::read_hello(Caller& caller) {
  auto* bytes = reinterpret_cast<std::byte*>(&caller.hello);
  while (caller.received < sizeof caller.hello) {
    const ssize_t got =
        ::recv(caller.socket.get(), bytes + caller.received, sizeof caller.hello - caller.received, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) break;
    caller.received += static_cast<std::size_t>(got);
  }
  caller.trusted = caller.received == sizeof caller.hello && caller.hello.shows(secret_);
  if (!caller.trusted) caller.socket = {};
  caller.until = caller.trusted ? Clock::now() + kMostOfAJoiner : Clock::time_point{};
}

bool Plane::attach(Caller& caller) {
  const auto place = peers_.find(caller.hello.from);
  if (place == peers_.end()) return false;
  Peer& peer = place->second;
  if (peer.link == Link::ended || peer.calls || peer.by_unix != caller.by_unix) return true;
  if (has_ended_there(caller.socket.get())) return true;
  if (!peer.answered && may_call(peer)) return false;
  if (peer.link == Link::up) read(peer);  // its messages from before it called again
  if (peer.link == Link::ended) return true;
  set_link(peer, Link::none);
  peer.socket = std::move(caller.socket);
  const Hello hello{.secret = peer.info.secret, .from = process_};
  send(peer, &hello, sizeof hello);
  set_link(peer, Link::up);
  return true;
}

// ---- Messages ----
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

void Plane::apply(const Token& process, const Message& message) {
  if (message.type != MessageType::ended) {
    for (Membership* member : members_) member->hear(process, message);
    return;
  }
  const auto from = peers_.find(process);
  const auto place = peers_.find(message.process);
  if (from == peers_.end() || place == peers_.end()) return;
  if (from->second.info.identity.same_host(place->second.info.identity)) has_ended(place->second, false);
}

}  // namespace deep_ep::control
