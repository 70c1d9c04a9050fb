#include "csrc/control/plane.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "csrc/control/membership.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::control {
namespace {

using std::chrono::milliseconds;

constexpr auto kMostOfACall = milliseconds(3000);         ///< a cut network does not answer at all
constexpr auto kMostWithinAHost = milliseconds(600'000);  ///< nothing but the other process ends a call there
constexpr auto kBetweenCalls = milliseconds(50);
/// After this time without a call, a process asks by a call of its own whether the other one of its host still lives.
constexpr auto kBeforeAsking = milliseconds(500);
constexpr auto kMostOfAHello = milliseconds(5000);
constexpr auto kWithoutDescriptors = milliseconds(100);
/// In this time the data that a process sent before it ended arrives, also from its NIC, and its last words.
constexpr auto kToArrive = milliseconds(20);
constexpr std::size_t kMostStrangers = 64;
constexpr auto kRefusedAtLeast = milliseconds(400);  ///< a firewall that is loaded anew refuses for a moment, too

Settings read_settings() {
  Settings settings;
  environment::Reader reader;
  settings.on = reader.choice("DEEP_EP_CONTROL") == "on";
  const auto ports =
      reader.read("DEEP_EP_CONTROL_PORTS", [](const environment::Value& value) { return parse_ports(value.text); });
  if (ports) settings.ports = *ports;
  return settings;
}

}  // namespace

std::string describe(const ProcessInfo& info) {
  return fmt::format("process {} on {}", info.pid, info.identity.host.data());
}

// ---- The life of a plane ----

std::shared_ptr<Plane> Plane::of_process() {
  static std::mutex mutex;
  static std::weak_ptr<Plane> shared;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Plane> plane = shared.lock();
  if (plane == nullptr || plane->home_.left()) {  // a forked child leaves its parent's plane alone
    plane = std::make_shared<Plane>(read_settings());
    shared = plane;
  }
  return plane;
}

Plane::Plane(const Settings& settings) : settings_(settings), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) fail<SystemError>("control connections: eventfd: {}", errno_text(errno));
  // No descriptor stays open in a forked child, which would keep connections alive that end with this process.
  static const int registered = ::pthread_atfork([] { mutex_.lock(); }, [] { mutex_.unlock(); },
                                                 [] {
                                                   for (Plane* plane : planes_) plane->close_descriptors();
                                                   planes_.clear();
                                                   mutex_.unlock();
                                                 });
  static_cast<void>(registered);  // fails only where memory has run out
  const std::lock_guard lock(mutex_);
  planes_.insert(this);
}

Plane::~Plane() {
  stop();
  const std::lock_guard lock(mutex_);
  planes_.erase(this);
}

void Plane::stop() {
  std::unique_lock lock(mutex_);
  ending_ = true;
  wake();
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  lock.lock();
  close_descriptors();
}

void Plane::close_descriptors() {
  wake_ = {};
  unix_listener_ = {};
  tcp_.socket = {};
  for (auto& [process, peer] : peers_) peer.connection = {};
  strangers_.clear();
}

ProcessInfo Plane::info(bool by_tcp) {
  const std::lock_guard lock(mutex_);
  ProcessInfo info{.identity = this_process(), .process = process_, .secret = secret_, .pid = ::getpid()};
  info.on = settings_.on ? 1 : 0;
  info.buffer = random_bits<std::uint64_t>();
  if (!settings_.on) return info;
  if (!unix_listener_) unix_listener_ = listen_at(unix_address(process_));
  if (!unix_listener_) fail<SystemError>("control connections: cannot listen on a Unix socket: {}", errno_text(errno));
  if (by_tcp && !tcp_.socket) tcp_ = listen_by_tcp(settings_.ports);
  info.tcp = tcp_.address;
  return info;
}

void Plane::connect(const Membership& member, std::unique_lock<std::mutex>& lock) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(settings_.connect_s));
  const ProcessInfo& own = member.info(member.rank_);
  for (int rank = 0; rank < member.size(); ++rank) {
    const ProcessInfo& info = member.info(rank);
    if (info.process == process_) continue;
    const auto [place, is_new] = peers_.try_emplace(info.process);
    Peer& peer = place->second;
    if (!is_new && peer.link < Link::ended) continue;
    peer = Peer();  // also one that a refused call took for dead
    peer.info = info;
    peer.rank = rank;
    peer.address = own.identity.same_network(info.identity) ? unix_address(info.process) : info.tcp;
    if (!calls(peer)) peer.next = Clock::now() + kBeforeAsking;
  }
  if (!thread_.joinable()) {
    thread_ = std::thread([this] {
      try {
        run();
      } catch (const std::exception& error) {
        log::warn("control: the thread ends, so lost ranks end waits at their deadlines: {}", error.what());
      }
    });
  }
  wake();
  for (;;) {
    const auto missing =
        std::ranges::find_if(peers_, [&](const auto& one) { return member.has(one.first) && !one.second.was_up; });
    if (missing == peers_.end()) return;
    const Peer& peer = missing->second;
    if (peer.link >= Link::ended || Clock::now() > deadline) throw SystemError(why_not_connected(member, peer));
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    lock.lock();
  }
}

std::string Plane::why_not_connected(const Membership& member, const Peer& peer) const {
  const std::string own = fmt::format("rank {}", member.rank_);
  const std::string other = fmt::format("rank {} ({})", peer.rank, describe(peer.info));
  if (peer.link >= Link::ended) {
    return fmt::format("control connections: {} has ended while {} connected to it", other, own);
  }
  const bool calls = this->calls(peer);
  const Address& address = calls || peer.address.is_unix() ? peer.address : tcp_.address;
  const std::string why = !calls ? "no call came" : peer.error == 0 ? "no answer" : errno_text(peer.error);
  return fmt::format(
      "control connections: {} did not reach {} at {} within {} s: {}: is the port open? DEEP_EP_CONTROL_PORTS gives a "
      "range of ports, DEEP_EP_SOCKET_IFNAME the interface",
      calls ? own : other, calls ? other : own, to_string(address), settings_.connect_s, why);
}

// ---- The thread ----

void Plane::run() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, nullptr);  // signals are for the program's own threads
  ::pthread_setname_np(::pthread_self(), "deep_ep_control");
  std::unique_lock lock(mutex_);
  while (!ending_) {
    Clock::time_point next = step(Clock::now());
    std::vector<pollfd> polled;  // those without a descriptor are ignored
    const auto add = [&](const UniqueFd& fd, short events = POLLIN) { polled.push_back({fd.get(), events, 0}); };
    add(wake_);
    if (Clock::now() >= listens_again_) {
      add(unix_listener_);
      add(tcp_.socket);
    } else {
      next = std::min(next, listens_again_);
    }
    for (const auto& [process, peer] : peers_) {
      add(peer.connection.socket, peer.connection.unsent.empty() ? POLLIN : POLLIN | POLLOUT);
    }
    for (const Stranger& caller : strangers_) add(caller.connection.socket);
    const auto most_ms = std::chrono::ceil<milliseconds>(next - Clock::now()).count();
    lock.unlock();
    ::poll(polled.data(), polled.size(), static_cast<int>(std::max<std::int64_t>(0, most_ms)));
    lock.lock();
    // Nothing of this waits, so all are asked.
    std::uint64_t count = 0;
    static_cast<void>(::read(wake_.get(), &count, sizeof count));
    for (auto& [process, peer] : peers_) {
      if (peer.connection.socket) serve(peer);
    }
    for (auto& [caller, until] : strangers_) {
      if (caller.receive() != 0) caller = {};
    }
    accept_from(unix_listener_);
    accept_from(tcp_.socket);
  }
}

void Plane::wake() const {
  const std::uint64_t one = 1;
  static_cast<void>(::write(wake_.get(), &one, sizeof one));  // full: the thread wakes up anyway
}

/// Does what is due, and says when the next thing is.
Plane::Clock::time_point Plane::step(Clock::time_point now) {
  Clock::time_point next = now + std::chrono::seconds(60);
  const auto is_due = [&](Clock::time_point when) {
    next = std::min(next, std::max(when, now));
    return when <= now;
  };
  for (auto& [process, peer] : peers_) {
    const bool is_called = peer.link == Link::none && !calls(peer) && !peer.was_up && !peer.address.is_unix();
    if (is_called || peer.link == Link::up || peer.link == Link::gone || !is_due(peer.next)) continue;
    if (peer.link == Link::none) {
      call(peer);
    } else if (peer.link == Link::calling) {
      failed(peer, ETIMEDOUT);
    } else {
      peer.link = Link::gone;
    }
  }
  strangers_.remove_if([&](Stranger& caller) { return is_due(caller.until) || !stays_strange(caller.connection); });
  for (Membership* member : members_) is_due(member->step(now));
  std::erase_if(peers_, [&](const auto& one) {
    return one.second.link == Link::gone &&
           std::ranges::none_of(members_, [&](const Membership* member) { return member->has(one.first); });
  });
  return next;
}

// ---- Connections ----

void Plane::call(Peer& peer) {
  peer.connection.socket = control::call(peer.address);
  if (!peer.connection.socket) return failed(peer, errno);
  set_link(peer, Link::calling, peer.address.is_unix() ? kMostWithinAHost : kMostOfACall);
  const Hello hello{.secret = peer.info.secret, .from = process_};
  const auto* bytes = reinterpret_cast<const std::byte*>(&hello);
  peer.connection.unsent.assign(bytes, bytes + sizeof hello);  // sent when it is connected
}

void Plane::accept_from(const UniqueFd& listener) {
  UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket && (errno == EMFILE || errno == ENFILE)) listens_again_ = Clock::now() + kWithoutDescriptors;
  if (!socket || (&listener == &unix_listener_ && !is_of_this_user(socket.get()))) return;
  // A flood pushes out those that have been silent for longest. A process of the job speaks at once, and calls again.
  if (strangers_.size() == kMostStrangers) strangers_.pop_front();
  strangers_.push_back({.connection = {std::move(socket)}, .until = Clock::now() + kMostOfAHello});
}

/// False: it is no stranger any more, or it is to be forgotten.
bool Plane::stays_strange(Connection& caller) {
  Hello hello;
  if (!caller.peek(hello)) return static_cast<bool>(caller.socket);
  if (!hello.shows(secret_)) return false;
  const auto place = peers_.find(hello.from);
  if (place == peers_.end()) return true;  // this process is about to hear of it
  Peer& peer = place->second;
  if (calls(peer)) {  // it has no connection, and asks whether this process lives: does it take a report?
    for (const Membership* member : members_) say(*member, peer);
    return false;
  }
  caller.take(hello);
  if (caller.receive() != 0) return false;  // it gave up before this process took the call, and calls again
  peer.connection = std::move(caller);
  const Hello answer{.secret = peer.info.secret, .from = process_};
  peer.connection.send(&answer, sizeof answer);
  set_link(peer, Link::up);
  serve(peer);
  return false;
}

void Plane::serve(Peer& peer) {
  Connection& connection = peer.connection;
  const int error = connection.receive();
  Hello answer;
  if (peer.link == Link::calling && connection.take(answer)) {
    if (!answer.shows(secret_) || !(answer.from == peer.info.process)) return failed(peer, EPROTO);
    set_link(peer, Link::up);
  }
  for (Report report; peer.link == Link::up && connection.take(report);) {
    for (Membership* member : members_) member->hear(peer.info.process, report);
  }
  if (error != 0) return failed(peer, error);
  if (!connection.unsent.empty()) connection.send();
  if (!connection.unsent.empty() || !std::exchange(peer.behind, false)) return;
  for (const Membership* member : members_) say(*member, peer);
}

void Plane::failed(Peer& peer, int error) {
  // Within a host only the end of a process ends a connection, or makes it refuse a call: it listened before the others
  // heard of it.
  const bool shows_end = peer.link == Link::up || error == ECONNREFUSED;
  if (shows_end && peer.address.is_unix()) return set_link(peer, Link::ended, kToArrive);
  set_link(peer, Link::none, kBetweenCalls);
  peer.error = error;
  if (!peer.was_up || error != ECONNREFUSED) {
    peer.refused_since.reset();
  } else if (!peer.refused_since) {
    peer.refused_since = Clock::now();
  } else if (Clock::now() - *peer.refused_since >= kRefusedAtLeast) {
    set_link(peer, Link::ended, kToArrive);
  }
}

void Plane::set_link(Peer& peer, Link link, Clock::duration until_next) {
  peer.link = link;
  peer.next = Clock::now() + until_next;
  if (link == Link::none || link == Link::ended) peer.connection = {};
  if (link != Link::up) return;
  peer.was_up = true;
  peer.behind = false;
  peer.refused_since.reset();
  for (const Membership* member : members_) say(*member, peer);  // what was said meanwhile is lost
}

// ---- Reports ----

void Plane::say(const Membership& member) {
  for (auto& [process, peer] : peers_) say(member, peer);
  for (Membership* one : members_) one->hear(process_, member.report());  // ranks that are threads of this process
  wake();
}

void Plane::say(const Membership& member, Peer& peer) {
  if (peer.link != Link::up || !member.has(peer.info.process)) return;
  peer.behind |= !peer.connection.unsent.empty();
  if (!peer.behind) peer.connection.send(&member.report(), sizeof(Report));
}

}  // namespace deep_ep::control
