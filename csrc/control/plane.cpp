#include "csrc/control/plane.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::control {
namespace {

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

void Plane::close_descriptors() {
  wake_ = {};
  unix_listener_ = {};
  tcp_.socket = {};
  for (auto& [process, peer] : peers_) {
    peer.to = {};
    peer.process = {};
  }
  callers_.clear();
}

std::shared_ptr<Plane> Plane::of_process() {
  static std::mutex mutex;
  static std::weak_ptr<Plane> shared;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Plane> plane = shared.lock();
  if (plane == nullptr || plane->home_.left()) {
    // A forked child's plane is its own. That of its parent must not end here: its thread is not in this process.
    if (plane != nullptr) static_cast<void>(new std::shared_ptr<Plane>(std::move(plane)));
    plane = std::make_shared<Plane>(read_settings());
    shared = plane;
  }
  return plane;
}

Plane::Plane(const Settings& settings) : settings_(settings), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) fail<SystemError>("control connections: eventfd: {}", errno_text(errno));
  // No descriptor stays open in a forked child, which would keep connections alive that end with this process.
  static const auto for_all = [](void (*what)(Plane&)) {
    std::ranges::for_each(planes_, [&](Plane* one) { what(*one); });
  };
  static const int registered = ::pthread_atfork(
      [] {
        planes_mutex_.lock();
        for_all([](Plane& plane) { plane.mutex_.lock(); });
      },
      [] {
        for_all([](Plane& plane) { plane.mutex_.unlock(); });
        planes_mutex_.unlock();
      },
      [] {
        for_all([](Plane& plane) {
          plane.close_descriptors();
          plane.mutex_.unlock();
        });
        planes_.clear();
        planes_mutex_.unlock();
      });
  static_cast<void>(registered);  // fails only where memory has run out
  const std::lock_guard lock(planes_mutex_);
  planes_.insert(this);
}

Plane::~Plane() {
  if (home_.left()) {  // the thread is not in this process
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(planes_mutex_);
    planes_.erase(this);
  }
  stop();
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

ProcessInfo Plane::info(bool by_tcp) {
  const std::lock_guard lock(mutex_);
  ProcessInfo info{.identity = this_process(), .process = process_, .secret = secret_, .pid = ::getpid()};
  info.on = settings_.on ? 1 : 0;
  info.buffer = random_bits<std::uint64_t>();
  struct stat status {};
  if (::stat("/proc/self/ns/pid", &status) == 0) info.pid_namespace = status.st_ino;
  if (!settings_.on) return info;
  if (settings_.unix_sockets && !unix_listener_) unix_listener_ = listen_by_unix(process_);
  if (by_tcp && !tcp_.socket) tcp_ = listen_by_tcp(settings_.ports);
  info.tcp = tcp_.addresses;
  return info;
}

void Plane::connect(const Membership& member, std::unique_lock<std::mutex>& lock) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(settings_.connect_s));
  const ProcessInfo& own = member.at(member.rank_).info;
  for (int rank = 0; rank < member.size(); ++rank) {
    const ProcessInfo& info = member.at(rank).info;
    if (info.process == process_) continue;
    const auto [place, is_new] = peers_.try_emplace(info.process);
    Peer& peer = place->second;
    if (!is_new && peer.link != Link::ended) continue;
    peer = Peer();  // also one that a refused call took for dead
    peer.info = info;
    peer.rank = rank;
    peer.by_unix = reaches_by_unix(own, info);
    const bool sees_pid = own.pid_namespace != 0 && own.pid_namespace == info.pid_namespace;
    if (!sees_pid || !own.identity.same_host(info.identity)) continue;
    peer.process = watch_process(info.pid);
    if (!peer.process && errno == ESRCH) has_ended(peer, true);
  }
  start_thread();
  wake();
  for (;;) {
    const auto missing = std::ranges::find_if(
        peers_, [&](const auto& one) { return member.has(one.first) && !(one.second.was_up && is_heard(one.first)); });
    if (missing == peers_.end()) return;
    const Peer& peer = missing->second;
    if (peer.link == Link::ended || Clock::now() > deadline) throw SystemError(why_not_connected(member, peer));
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    lock.lock();
  }
}

std::string Plane::why_not_connected(const Membership& member, const Peer& peer) const {
  const std::string own = fmt::format("rank {}", member.rank_);
  const std::string other = fmt::format("rank {} ({})", peer.rank, describe(peer.info));
  if (peer.link == Link::ended) {
    return fmt::format("control connections: {} has ended while {} connected to it", other, own);
  }
  const Address& address = peer.was_up ? tcp_.addresses.front() : peer.info.tcp[peer.address];
  const std::string why = peer.was_up ? "no call came" : peer.error == 0 ? "no answer" : errno_text(peer.error);
  return fmt::format(
      "control connections: {} did not reach {} at {} within {} s: {}: is the port open? DEEP_EP_CONTROL_PORTS gives a "
      "range of ports, DEEP_EP_SOCKET_IFNAME the interface",
      peer.was_up ? other : own, peer.was_up ? own : other, peer.by_unix ? "a Unix socket" : to_string(address),
      settings_.connect_s, why);
}

void Plane::wake() const {
  const std::uint64_t one = 1;
  static_cast<void>(::write(wake_.get(), &one, sizeof one));  // full: the thread wakes up anyway
}

void Plane::start_thread() {
  if (thread_.joinable()) return;
  thread_ = std::thread([this] {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);  // signals are for the program's own threads
    ::pthread_setname_np(::pthread_self(), "deep_ep_control");
    try {
      run();
    } catch (const std::exception& error) {
      log::warn("control: the thread ends, so lost ranks end waits at their deadlines: {}", error.what());
    }
  });
}

void Plane::run() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    Clock::time_point next = step(Clock::now());
    std::vector<pollfd> polled;
    std::vector<std::function<void()>> handlers;
    const auto add = [&](const UniqueFd& fd, bool writes, auto handler) {
      if (!fd) return;
      const int events = POLLIN | (writes ? POLLOUT : 0);
      polled.push_back({.fd = fd.get(), .events = static_cast<short>(events), .revents = 0});
      handlers.emplace_back(std::move(handler));
    };
    add(wake_, false, [&] {
      std::uint64_t count = 0;
      static_cast<void>(::read(wake_.get(), &count, sizeof count));
    });
    for (auto& [process, peer] : peers_) {
      add(peer.process, false, [this, &peer] { has_ended(peer, true); });
      add(peer.to.socket, !peer.to.unsent.empty(), [this, &peer] {
        if (peer.to.socket) serve(peer);
      });
    }
    for (Caller& caller : callers_) {
      add(caller.from.socket, false, [this, &caller] { serve(caller); });
    }
    // Last: a new socket may get the number of a descriptor that was closed before.
    if (Clock::now() >= listens_again_) {
      add(unix_listener_, false, [&] { accept_from(unix_listener_, true); });
      add(tcp_.socket, false, [&] { accept_from(tcp_.socket, false); });
    } else {
      next = std::min(next, listens_again_);
    }
    const auto most_ms = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
    lock.unlock();
    ::poll(polled.data(), polled.size(), static_cast<int>(std::max<std::int64_t>(0, most_ms)));
    lock.lock();
    for (std::size_t i = 0; i < polled.size() && !ending_; ++i) {
      if (polled[i].revents != 0) handlers[i]();
    }
  }
}

}  // namespace deep_ep::control
