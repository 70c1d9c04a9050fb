// The part of the control thread that keeps connections: calls, callers, and evidence that a process has ended.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "csrc/control/plane.hpp"

namespace deep_ep::control {
namespace {

using std::chrono::milliseconds;

constexpr auto kMostOfACall = milliseconds(3000);  ///< an address without a host does not answer at all
constexpr auto kBetweenCalls = milliseconds(50);
constexpr auto kMostOfAHello = milliseconds(5000);
/// In this time the data that a process sent before it ended arrives, also from its NIC, and its last words.
constexpr auto kToArrive = milliseconds(20);
constexpr int kMostCallers = 64;                     ///< that have not been answered
constexpr auto kRefusedAtLeast = milliseconds(400);  ///< a firewall that is loaded anew refuses for a moment, too
constexpr auto kWithoutDescriptors = milliseconds(100);
constexpr std::size_t kMostRecent = 256;

}  // namespace

Plane::Clock::time_point Plane::step(Clock::time_point now) {
  Clock::time_point next = now + std::chrono::seconds(60);
  const auto is_due = [&](Clock::time_point when) {
    next = std::min(next, std::max(when, now));
    return when <= now;
  };
  for (auto& [process, peer] : peers_) {
    if (peer.link == Link::up || peer.known || !is_due(peer.next)) continue;
    if (peer.link == Link::none) {
      call(peer);
    } else if (peer.link == Link::calling) {
      failed(peer, ETIMEDOUT);
    } else {
      peer.known = true;
      for (Membership* member : members_) member->judge();
    }
  }
  std::erase_if(peers_, [&](const auto& one) {
    return one.second.known && std::ranges::none_of(members_, [&](const Membership* m) { return m->has(one.first); });
  });
  callers_.remove_if(
      [&](Caller& one) { return !one.from.socket || (!one.answered && (is_due(one.until) || !understand(one))); });
  for (Membership* member : members_) is_due(member->step(now));
  return next;
}

// ---- Calls ----

void Plane::call(Peer& peer) {
  peer.to.socket =
      peer.by_unix ? call_by_unix(peer.info.process) : call_by_tcp(peer.info.tcp[peer.address], tcp_.choice);
  if (!peer.to.socket) return failed(peer, errno);
  set_link(peer, Link::calling, kMostOfACall);
  const Hello hello{.secret = peer.info.secret, .from = process_};
  const auto* bytes = reinterpret_cast<const std::byte*>(&hello);
  peer.to.unsent.assign(bytes, bytes + sizeof hello);  // sent when it is connected
}

void Plane::serve(Peer& peer) {
  const int error = peer.to.receive();
  Hello answer;
  if (peer.link == Link::calling && peer.to.take(answer)) {
    if (!answer.shows(secret_) || !(answer.from == peer.info.process)) return failed(peer, EPROTO);
    set_link(peer, Link::up);
  }
  if (peer.link == Link::up) peer.to.received.clear();  // it speaks by its own call
  if (error != 0) return failed(peer, error);
  if (!peer.to.unsent.empty()) peer.to.send();
}

void Plane::failed(Peer& peer, int error) {
  // Nothing but the end of a process closes a connection within a host.
  if (peer.link == Link::up && peer.by_unix) return has_ended(peer, true);
  set_link(peer, Link::none, kBetweenCalls);
  peer.error = error;
  if (!peer.was_up) {
    ++peer.address;
    if (peer.address == kMostAddresses || peer.info.tcp[peer.address].size == 0) peer.address = 0;
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
  if (link == Link::none || link == Link::ended) peer.to = {};
  if (link != Link::up) return;
  peer.refused_since.reset();
  if (!std::exchange(peer.was_up, true)) return;
  for (const Message& message : recent_) peer.to.send(&message, sizeof message);  // some may have been lost
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

void Plane::accept_from(const UniqueFd& listener, bool by_unix) {
  UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket && (errno == EMFILE || errno == ENFILE)) listens_again_ = Clock::now() + kWithoutDescriptors;
  if (!socket || (by_unix && !is_of_this_user(socket.get()))) return;
  // A flood pushes out those that have been silent for longest. A process of the job speaks at once, and calls again.
  const auto waits = [](const Caller& one) { return !one.answered; };
  if (std::ranges::count_if(callers_, waits) >= kMostCallers) callers_.erase(std::ranges::find_if(callers_, waits));
  callers_.push_back({.from = {std::move(socket)}, .until = Clock::now() + kMostOfAHello});
}

void Plane::serve(Caller& caller) {
  const int error = caller.from.receive();
  // The end of a caller says nothing: this process calls it, too.
  if (!understand(caller) || error != 0) caller.from = {};
}

/// False: it is a stranger, or speaks another language.
bool Plane::understand(Caller& caller) {
  if (!caller.trusted && caller.from.take(caller.hello)) {
    if (!caller.hello.shows(secret_)) return false;
    caller.trusted = true;
  }
  if (!caller.trusted) return true;
  if (!caller.answered) {
    const auto place = peers_.find(caller.hello.from);
    if (place == peers_.end()) return true;  // this process is about to hear of it
    const Hello answer{.secret = place->second.info.secret, .from = process_};
    caller.from.send(&answer, sizeof answer);
    caller.answered = true;
  }
  for (Message message; caller.from.take(message);) {
    if (!message.well_formed()) return false;
    apply(caller.hello.from, message);
  }
  return true;
}

bool Plane::is_heard(const Token& process) const {
  return std::ranges::any_of(callers_, [&](const Caller& one) { return one.answered && one.hello.from == process; });
}

// ---- Messages ----

void Plane::broadcast(const Message& message) {
  if (message.type != MessageType::waits) {  // these are repeated while the wait lasts
    if (recent_.size() >= kMostRecent) {     // the others say what must not be missed
      const auto least = std::ranges::find(recent_, MessageType::leaves_out, &Message::type);
      recent_.erase(least == recent_.end() ? recent_.begin() : least);
    }
    recent_.push_back(message);
  }
  for (auto& [process, peer] : peers_) {
    if (peer.link != Link::up) continue;
    peer.to.send(&message, sizeof message);
    if (!peer.to.unsent.empty()) wake();  // the thread sends the rest
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
