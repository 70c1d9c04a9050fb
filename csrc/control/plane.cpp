#include "csrc/control/plane.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::control {

/// All planes of this process, for fork(): no descriptor of theirs stays open in a child, which would keep connections
/// alive that end with this process.
struct Forks {
  static void add(Plane* plane) {
    static const int registered = ::pthread_atfork(&before, &after_in_parent, &after_in_child);
    static_cast<void>(registered);  // fails only where memory has run out
    const std::lock_guard lock(mutex);
    planes.insert(plane);
  }
  static void remove(Plane* plane) {
    const std::lock_guard lock(mutex);
    planes.erase(plane);
  }

 private:
  static void before() {
    mutex.lock();
    for (Plane* plane : planes) plane->mutex_.lock();
  }
  static void after_in_parent() {
    for (Plane* plane : planes) plane->mutex_.unlock();
    mutex.unlock();
  }
  static void after_in_child() {
    for (Plane* plane : planes) {
      plane->close_descriptors();
      plane->mutex_.unlock();
    }
    planes.clear();
    mutex.unlock();
  }

  inline static std::mutex mutex;
  inline static std::set<Plane*> planes;
};

void Plane::close_descriptors() {
  wake_ = {};
  unix_listener_ = {};
  tcp_.socket = {};
  for (auto& [process, peer] : peers_) {
    peer.socket = {};
    peer.probe = {};
    peer.process = {};
  }
  for (Stranger& stranger : strangers_) stranger.socket = {};
}

Settings read_settings() {
  Settings settings;
  environment::Reader reader;
  settings.on = reader.choice("DEEP_EP_CONTROL") == "on";
  const auto ports =
      reader.read("DEEP_EP_CONTROL_PORTS", [](const environment::Value& value) { return parse_ports(value.text); });
  if (ports) settings.ports = *ports;
  return settings;
}

std::string describe(const Card& card) { return fmt::format("process {} on {}", card.pid, card.identity.host.data()); }

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

Plane::Plane(const Settings& settings)
    : settings_(settings),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_([](const Token& a, const Token& b) { return a.words < b.words; }) {
  if (!wake_) fail<SystemError>("control connections: eventfd: {}", errno_text(errno));
  Forks::add(this);
}

Plane::~Plane() {
  if (home_.left()) {  // the thread is not in this process
    if (thread_.joinable()) thread_.detach();
    return;
  }
  Forks::remove(this);
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

Card Plane::card(bool by_tcp, bool describes) {
  const std::lock_guard lock(mutex_);
  Card card{.identity = this_process(), .process = process_, .secret = secret_, .pid = ::getpid()};
  card.on = settings_.on ? 1 : 0;
  card.buffer = random_bits<std::uint64_t>();
  struct stat status {};
  if (::stat("/proc/self/ns/pid", &status) == 0) card.pid_namespace = status.st_ino;
  if (!settings_.on || describes) return card;
  if (settings_.unix_sockets && !unix_listener_) unix_listener_ = listen_by_unix(process_);
  if (by_tcp && !tcp_.socket) tcp_ = listen_by_tcp(settings_.ports);
  card.tcp = tcp_.addresses;
  return card;
}

int Plane::sit_down(std::uint64_t buffer, int rank, const std::vector<Card>& ranks, const Words& words) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(settings_.connect_s));
  std::unique_lock lock(mutex_);
  Seat& seat = seats_.emplace_back();
  try {
    connect_all(seat, buffer, rank, ranks, words, deadline, lock);
  } catch (...) {
    seats_.remove_if([&](const Seat& one) { return &one == &seat; });
    throw;
  }
  return seat.number;
}

void Plane::connect_all(Seat& seat, std::uint64_t buffer, int rank, const std::vector<Card>& ranks, const Words& words,
                        Clock::time_point deadline, std::unique_lock<std::mutex>& lock) {
  seat.number = seats_so_far_++;
  seat.buffer = buffer;
  seat.rank = rank;
  seat.words = words;
  seat.facts.resize(ranks.size());
  seat.left.resize(ranks.size());
  seat.lost.assign(ranks.size(), kNobody);
  const Card& own = ranks[static_cast<std::size_t>(rank)];
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    const Card& card = ranks[other];
    seat.processes.push_back(card.process);
    if (card.process == process_) continue;
    Peer& peer = peers_[card.process];
    if (!peer.ended && peer.card.process == card.process) continue;
    peer = Peer();  // also one that a refused call took for dead
    peer.card = card;
    peer.rank = static_cast<int>(other);
    peer.by_unix = reaches_by_unix(own, card);
    peer.calls = process_.words < card.process.words;
    const bool sees_pid = own.pid_namespace != 0 && own.pid_namespace == card.pid_namespace;
    if (!sees_pid || !own.identity.same_host(card.identity)) continue;
    peer.process = watch_process(card.pid);
    if (!peer.process && errno == ESRCH) has_ended(peer, true);
  }
  start_thread();
  wake();
  for (;;) {
    const auto missing = std::ranges::find_if(peers_, [&](const auto& one) {
      return !one.second.was_up && std::ranges::find(seat.processes, one.first) != seat.processes.end();
    });
    if (missing == peers_.end()) return;
    if (missing->second.ended || Clock::now() > deadline) throw SystemError(why_not_connected(seat, missing->second));
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    lock.lock();
  }
}

std::string Plane::why_not_connected(const Seat& seat, const Peer& peer) const {
  const std::string whom = fmt::format("rank {} ({})", peer.rank, describe(peer.card));
  if (peer.ended) {
    return fmt::format("control connections: {} has ended while rank {} connected to it", whom, seat.rank);
  }
  const Address& address = (peer.calls ? peer.card.tcp[peer.address] : tcp_.addresses.front());
  const std::string where = peer.by_unix ? std::string("a Unix socket") : to_string(address);
  if (!peer.calls) {
    return fmt::format(
        "control connections: {} did not call rank {} at {} within {} s: is the port open? DEEP_EP_CONTROL_PORTS gives "
        "a range of ports, DEEP_EP_SOCKET_IFNAME the interface",
        whom, seat.rank, where, settings_.connect_s);
  }
  return fmt::format(
      "control connections: rank {} did not reach {} at {} within {} s: {}: is the port open? DEEP_EP_CONTROL_PORTS "
      "gives a range of ports, DEEP_EP_SOCKET_IFNAME the interface",
      seat.rank, whom, where, settings_.connect_s, peer.error == 0 ? "no answer" : errno_text(peer.error));
}

const Plane::Seat& Plane::seat(int number) const {
  return *std::ranges::find_if(seats_, [&](const Seat& one) { return one.number == number; });
}

void Plane::leave(int number) {
  const std::lock_guard lock(mutex_);
  const auto place = std::ranges::find_if(seats_, [&](const Seat& one) { return one.number == number; });
  look_for_end(*place);
  say({.say = Say::left, .buffer = place->buffer, .rank = place->rank});
  seats_.erase(place);
}

std::vector<int> Plane::lost(int number) const {
  const std::lock_guard lock(mutex_);
  return seat(number).lost;
}

std::vector<int> Plane::gone(int number) const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  const std::vector<RankFacts>& facts = seat(number).facts;
  for (std::size_t rank = 0; rank < facts.size(); ++rank) {
    if (facts[rank].gone) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void Plane::wake() const {
  const std::uint64_t one = 1;
  static_cast<void>(::write(wake_.get(), &one, sizeof one));  // full: the thread wakes up anyway
}

void Plane::start_thread() {
  if (thread_.joinable()) return;
  // Signals are for the program's own threads.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] {
      try {
        run();
      } catch (const std::exception& error) {
        log::warn("control: the thread ends, so lost ranks end waits at their deadlines: {}", error.what());
      }
    });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(thread_.native_handle(), "deep_ep_control");
}

void Plane::run() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    step(Clock::now());
    std::vector<pollfd> polled{{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
    const auto add = [&](const UniqueFd& fd, int events) {
      if (fd) polled.push_back({.fd = fd.get(), .events = static_cast<short>(events), .revents = 0});
    };
    for (const auto& [process, peer] : peers_) {
      if (peer.ended) continue;
      add(peer.process, POLLIN);
      add(peer.probe, POLLOUT);
      const bool writes = peer.link == Link::connecting || !peer.unsent.empty();
      add(peer.socket, POLLIN | (writes ? POLLOUT : 0));
    }
    for (const Stranger& stranger : strangers_) {
      if (!stranger.trusted) add(stranger.socket, POLLIN);
    }
    if (Clock::now() >= listens_again_) {
      add(unix_listener_, POLLIN);
      add(tcp_.socket, POLLIN);
    }
    const int wait_ms = next_step_ms(Clock::now());
    lock.unlock();
    ::poll(polled.data(), polled.size(), wait_ms);
    lock.lock();
    handle(polled);
  }
}

void Plane::handle(std::span<const pollfd> polled) {
  std::map<int, short> ready;
  for (const pollfd& one : polled) {
    if (one.revents != 0) ready[one.fd] = one.revents;
  }
  if (ready.contains(wake_.get())) {
    std::uint64_t count = 0;
    static_cast<void>(::read(wake_.get(), &count, sizeof count));
  }
  const auto now = Clock::now();
  for (auto& [process, peer] : peers_) {
    if (peer.ended) continue;
    const bool has_died = ready.contains(peer.process.get());
    if (peer.probe && ready.contains(peer.probe.get())) probed(peer);
    if (peer.socket && ready.contains(peer.socket.get())) {
      if (peer.link == Link::connecting) {
        connected(peer, now);
      } else {
        if ((ready[peer.socket.get()] & POLLOUT) != 0) send(peer, nullptr, 0);
        read(peer);
      }
    } else if (has_died && peer.link == Link::up) {
      read(peer);  // its last words
    }
    if (has_died) has_ended(peer, true);
  }
  strangers_.remove_if([&](Stranger& one) { return !one.trusted && ready.contains(one.socket.get()) && !hear(one); });
  // Last: a new socket may get the number of a descriptor that was closed above.
  if (unix_listener_ && ready.contains(unix_listener_.get())) accept_from(unix_listener_.get(), true);
  if (tcp_.socket && ready.contains(tcp_.socket.get())) accept_from(tcp_.socket.get(), false);
}

}  // namespace deep_ep::control
