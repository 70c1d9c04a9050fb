#include "csrc/control/plane.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

#include "csrc/control/membership.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/open_files.hpp"
#include "csrc/support/threads.hpp"

namespace deep_ep::control {
namespace {

using std::chrono::milliseconds;

constexpr auto kMostOfACall = milliseconds(3000);  ///< a cut network does not answer at all
constexpr auto kBetweenCalls = milliseconds(50);
/// After this time without a call, a process asks by a call of its own whether the other one still lives.
constexpr auto kBeforeAsking = milliseconds(500);
/// In this time the data that a process sent before it ended arrives, also from its NIC, and its last words.
constexpr auto kToArrive = milliseconds(20);
constexpr auto kMostOfASleep = milliseconds(20);
constexpr int kLooks = 64;  ///< of the thread in a time-out, at least
constexpr std::size_t kMostStrangers = 64;
constexpr int kMostAtOnce = 16;   ///< callers taken between two looks at all connections
constexpr int kMostRefusals = 8;  ///< a firewall that is loaded anew refuses for a moment, too

Settings read_settings() {
  const auto ports = [](const environment::Value& value) { return parse_ports(value.text); };
  return {.on = environment::text("DEEP_EP_CONTROL") == "on",
          .ports = environment::Reader{}.read("DEEP_EP_CONTROL_PORTS", ports)};
}

}  // namespace

SocketAddress unix_address_of(const ProcessInfo& info) {
  return unix_address("deep_ep.control." + to_string(info.process));
}

std::string describe(const ProcessInfo& info) {
  return fmt::format("process {} on {}", info.pid, info.identity.host.data());
}

// ---- The life of a plane ----

std::shared_ptr<Plane> Plane::of_process() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Plane> plane = shared_.lock();
  if (plane == nullptr) shared_ = plane = std::make_shared<Plane>(read_settings());
  return plane;
}

Plane::Plane(const Settings& settings) : settings_(settings) {
  // No descriptor stays open in a forked child, which would keep connections alive that end with this process.
  const auto in_child = [] {
    for (Plane* plane : planes_) plane->close_descriptors();
    planes_.clear();
    shared_.reset();
    mutex_.unlock();
  };
  // (It fails only where memory has run out.)
  [[maybe_unused]] static const int registered =
      ::pthread_atfork([] { mutex_.lock(); }, [] { mutex_.unlock(); }, in_child);
  const std::lock_guard lock(mutex_);
  planes_.insert(this);
}

void Plane::stop() {
  ending_ = true;
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  close_descriptors();
  planes_.erase(this);
}

void Plane::close_descriptors() {
  unix_listener_ = {};
  tcp_listener_ = {};
  for (auto& [process, peer] : peers_) peer.connection = {};
  strangers_.clear();
}

ProcessInfo Plane::info(bool by_tcp) {
  const std::lock_guard lock(mutex_);
  ProcessInfo info{this_process(), process_, secret_, ::getpid(), settings_.on, random_bits<std::uint64_t>()};
  if (!settings_.on) return info;
  if (!unix_listener_) {
    unix_listener_ = listen_at(unix_address_of(info));
    if (!unix_listener_)
      fail<SystemError>("control connections: cannot listen on a Unix socket: {}", errno_text(errno));
  }
  if (by_tcp && !tcp_listener_) tcp_listener_ = listen_by_tcp(settings_.ports, tcp_address_);
  info.tcp = tcp_address_;
  return info;
}

void Plane::connect(Membership& member, std::unique_lock<std::mutex>& lock) {
  const ProcessIdentity& own = member.at(member.rank_).info.identity;
  make_room_for_files(static_cast<std::size_t>(
      std::ranges::count_if(member.ranks_, [&](const auto& rank) { return !peers_.contains(rank.info.process); })));
  for (int rank = 0; rank < member.size(); ++rank) {
    const ProcessInfo& info = member.at(rank).info;
    if (info.process == process_) continue;
    Peer& peer = peers_[info.process];
    member.at(rank).peer = &peer;
    if (peer.address.size != 0 && peer.link != Link::ended) continue;  // it is known
    peer = Peer();                                                     // also one that a refused call took for dead
    peer.info = info;
    peer.address = own.same_network(info.identity) ? unix_address_of(info) : info.tcp;
    if (!calls(peer)) peer.next = Clock::now() + kBeforeAsking;
  }
  if (!thread_.joinable()) {
    const SignalsBlocked blocked;
    thread_ = std::thread([this] {
      try {
        run();
      } catch (const std::exception& error) {
        log::warn("control: the thread ends, so lost ranks end waits at their deadlines: {}", error.what());
      }
    });
  }
  const auto is_missing = [](const auto& rank) { return rank.peer != nullptr && rank.peer->link != Link::up; };
  for (const Deadline deadline(settings_.connect_s);;) {
    const auto missing = std::ranges::find_if(member.ranks_, is_missing);
    if (missing == member.ranks_.end()) return;
    const Peer& peer = *missing->peer;
    if (peer.link == Link::ended || deadline.expired()) {
      throw SystemError(why_not_connected(member, static_cast<int>(missing - member.ranks_.begin())));
    }
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    lock.lock();
  }
}

std::string Plane::why_not_connected(const Membership& member, int rank) const {
  const Peer& peer = *member.at(rank).peer;
  const std::string own = fmt::format("rank {}", member.rank_), other = member.describe_process(rank);
  const bool calls = this->calls(peer);
  const SocketAddress& address = calls || peer.address.is_unix() ? peer.address : tcp_address_;
  const std::string why = !calls ? "no call came" : peer.error == 0 ? "no answer" : errno_text(peer.error);
  return fmt::format(
      "control connections: {} did not reach {} at {} within {} s: {}: has one of them ended, is the port open? "
      "DEEP_EP_CONTROL_PORTS gives a range of ports, DEEP_EP_SOCKET_IFNAME the interface",
      calls ? own : other, calls ? other : own, to_string(address), settings_.connect_s, why);
}

// ---- The thread ----

void Plane::run() {
  name_this_thread("deep_ep_control");
  std::unique_lock lock(mutex_);
  while (!ending_) {
    step(Clock::now());
    Clock::duration sleep = kMostOfASleep;
    for (const Membership* member : members_) sleep = std::min<Clock::duration>(sleep, member->timeout_ / kLooks);
    // Not the listeners: while this process may not open more, callers wait, and would wake the thread all the time.
    std::vector<pollfd> sockets;
    for (const Connection& caller : strangers_) sockets.push_back({caller.socket.get(), POLLIN, 0});
    for (const auto& [process, peer] : peers_) {
      if (peer.connection.socket) sockets.push_back({peer.connection.socket.get(), POLLIN, 0});
    }
    lock.unlock();
    const auto longest = std::chrono::ceil<milliseconds>(sleep);
    // It refuses more sockets than the process may open now.
    if (::poll(sockets.data(), sockets.size(), static_cast<int>(longest.count())) < 0)
      std::this_thread::sleep_for(longest);
    lock.lock();
    // Nothing of this waits, so all are asked.
    for (auto& [process, peer] : peers_) {
      if (peer.connection.socket) serve(peer);
    }
    accept_from(unix_listener_);
    accept_from(tcp_listener_);
    strangers_.remove_if([&](Connection& caller) { return caller.receive() != 0 || !stays_strange(caller); });
  }
}

void Plane::step(Clock::time_point now) {
  for (auto& [process, peer] : peers_) {
    if (now < peer.next) continue;
    if (peer.link == Link::none) {
      call(peer);
    } else if (peer.link == Link::calling &&
               !peer.address.is_unix()) {  // there only the end of the process ends a call
      failed(peer, ETIMEDOUT);
    }
  }
  for (Membership* member : members_) member->step(now);
}

// ---- Connections ----

void Plane::call(Peer& peer) {
  peer.connection.socket = call_at(peer.address);
  if (!peer.connection.socket) return failed(peer, errno);
  set_link(peer, Link::calling, kMostOfACall);
  const Hello hello{.secret = peer.info.secret, .from = process_};
  const auto* bytes = reinterpret_cast<const std::byte*>(&hello);
  peer.connection.unsent.assign(bytes, bytes + sizeof hello);  // to send it now would hide that the call is refused
}

void Plane::accept_from(const UniqueFd& listener) {
  for (int taken = 0; taken < kMostAtOnce; ++taken) {
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;  // there is no caller, or no descriptor: then callers wait
    if (&listener == &unix_listener_ && !is_of_this_user(socket.get())) continue;
    // A flood pushes out those that have been silent for longest. A process of the job speaks at once, and calls again.
    if (strangers_.size() == kMostStrangers) strangers_.pop_front();
    strangers_.push_back({std::move(socket)});
  }
}

/// False: it is no stranger any more, or it is to be forgotten.
bool Plane::stays_strange(Connection& caller) {
  Hello hello;
  if (!caller.take(hello)) return true;
  const auto place = peers_.find(hello.from);
  if (hello.secret != secret_ || place == peers_.end()) return false;  // an unknown process calls again
  Peer& peer = place->second;
  if (calls(peer)) {  // it has no connection, and asks whether this process lives: does it take a report?
    for (const Membership* member : members_) say(*member, peer);
    return false;
  }
  peer.connection = std::move(caller);
  const Hello answer{.secret = peer.info.secret, .from = process_};
  peer.connection.send(&answer, sizeof answer);
  set_link(peer, Link::up);
  return false;
}

void Plane::serve(Peer& peer) {
  Connection& connection = peer.connection;
  const int error = connection.receive();
  Hello answer;
  if (peer.link == Link::calling && connection.take(answer)) {
    if (answer.secret != secret_ || answer.from != peer.info.process) return failed(peer, EPROTO);
    set_link(peer, Link::up);
  }
  for (Report report; peer.link == Link::up && report.take(connection);) {
    for (Membership* member : members_) member->hear(peer.info.process, report);
  }
  if (error != 0) return failed(peer, error);
  if (connection.received.size() > Report::kMostBytes) return failed(peer, EPROTO);
  if (connection.unsent.empty()) return;
  connection.send();
  for (const Membership* member : members_) say(*member, peer);  // once it has taken what was said before: the latest
}

void Plane::failed(Peer& peer, int error) {
  // Within a host only the end of a process ends a connection, or makes it refuse a call: it listened before the others
  // heard of it.
  const bool refused = error == ECONNREFUSED;
  peer.error = error;
  peer.refusals = refused ? peer.refusals + 1 : 0;
  const bool has_ended = peer.address.is_unix() ? refused || peer.link == Link::up : peer.refusals == kMostRefusals;
  has_ended ? set_link(peer, Link::ended, kToArrive) : set_link(peer, Link::none, kBetweenCalls);
}

void Plane::set_link(Peer& peer, Link link, Clock::duration until_next) {
  peer.link = link;
  peer.next = Clock::now() + until_next;
  if (link == Link::none || link == Link::ended) peer.connection = {};
  if (link != Link::up) return;
  for (const Membership* member : members_) say(*member, peer);  // what was said meanwhile is lost
}

// ---- Reports ----

void Plane::say(const Membership& member) {
  for (auto& [process, peer] : peers_) say(member, peer);
  for (Membership* one : members_) one->hear(process_, member.report());  // ranks that are threads of this process
}

void Plane::say(const Membership& member, Peer& peer) {
  const bool has_it = std::ranges::any_of(member.ranks_, [&](const auto& rank) { return rank.peer == &peer; });
  if (!has_it || peer.link != Link::up || !peer.connection.unsent.empty()) return;
  member.report().send(peer.connection);
}

}  // namespace deep_ep::control
