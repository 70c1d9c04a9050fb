#include "csrc/control/plane.hpp"

#include <linux/sockios.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
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
namespace {

constexpr auto kMostOfAGoodbye = std::chrono::seconds(5);

/// Has the system of the other end taken all that was sent?
bool has_arrived(const UniqueFd& tcp_socket) {
  int on_the_way = 0;
  return ::ioctl(tcp_socket.get(), SIOCOUTQ, &on_the_way) == 0 && on_the_way == 0;
}

}  // namespace

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
  for (Caller& caller : callers_) caller.socket = {};
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

std::string describe(const ProcessInfo& info) {
  return fmt::format("process {} on {}", info.pid, info.identity.host.data());
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

ProcessInfo Plane::info(bool by_tcp, bool describes) {
  const std::lock_guard lock(mutex_);
  ProcessInfo info{.identity = this_process(), .process = process_, .secret = secret_, .pid = ::getpid()};
  info.on = settings_.on ? 1 : 0;
  info.buffer = random_bits<std::uint64_t>();
  struct stat status {};
  if (::stat("/proc/self/ns/pid", &status) == 0) info.pid_namespace = status.st_ino;
  if (!settings_.on || describes) return info;
  if (settings_.unix_sockets && !unix_listener_) unix_listener_ = listen_by_unix(process_);
  if (by_tcp && !tcp_.socket) tcp_ = listen_by_tcp(settings_.ports);
  info.tcp = tcp_.addresses;
  return info;
}

int Plane::join(std::uint64_t buffer, int rank, const std::vector<ProcessInfo>& ranks, const Words& words,
                const JoinOptions& options) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(settings_.connect_s));
  std::unique_lock lock(mutex_);
  Member& member = members_.emplace_back();
  member.number = members_so_far_++;
  member.buffer = buffer;
  member.rank = rank;
  member.words = words;
  member.options = options;
  member.looked = Clock::now();
  // Silent so far.
  for (const ProcessInfo& info : ranks) member.ranks.push_back({.process = info.process, .sign = -member.timeout()});
  try {
    connect_all(member, ranks, deadline, lock);
  } catch (...) {
    members_.remove_if([&](const Member& one) { return &one == &member; });
    throw;
  }
  return member.number;
}

void Plane::connect_all(Member& member, const std::vector<ProcessInfo>& ranks, Clock::time_point deadline,
                        std::unique_lock<std::mutex>& lock) {
  const ProcessInfo& own = ranks[static_cast<std::size_t>(member.rank)];
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    const ProcessInfo& info = ranks[other];
    if (info.process == process_) continue;
    Peer& peer = peers_[info.process];
    if (!peer.ended && peer.info.process == info.process) continue;
    peer = Peer();  // also one that a refused call took for dead
    peer.info = info;
    peer.rank = static_cast<int>(other);
    peer.by_unix = reaches_by_unix(own, info);
    peer.calls = process_.words < info.process.words;
    const bool sees_pid = own.pid_namespace != 0 && own.pid_namespace == info.pid_namespace;
    if (!sees_pid || !own.identity.same_host(info.identity)) continue;
    peer.process = watch_process(info.pid);
    if (!peer.process && errno == ESRCH) has_ended(peer, true);
  }
  start_thread();
  wake();
  for (;;) {
    const auto missing =
        std::ranges::find_if(peers_, [&](const auto& one) { return !one.second.was_up && member.has(one.first); });
    if (missing == peers_.end()) return;
    if (missing->second.ended || Clock::now() > deadline) throw SystemError(why_not_connected(member, missing->second));
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    lock.lock();
  }
}

std::string Plane::why_not_connected(const Member& member, const Peer& peer) const {
  const std::string whom = fmt::format("rank {} ({})", peer.rank, describe(peer.info));
  if (peer.ended) {
    return fmt::format("control connections: {} has ended while rank {} connected to it", whom, member.rank);
  }
  const Address& address = (peer.calls ? peer.info.tcp[peer.address] : tcp_.addresses.front());
  const std::string where = peer.by_unix ? std::string("a Unix socket") : to_string(address);
  if (!peer.calls) {
    return fmt::format(
        "control connections: {} did not call rank {} at {} within {} s: is the port open? DEEP_EP_CONTROL_PORTS gives "
        "a range of ports, DEEP_EP_SOCKET_IFNAME the interface",
        whom, member.rank, where, settings_.connect_s);
  }
  return fmt::format(
      "control connections: rank {} did not reach {} at {} within {} s: {}: is the port open? DEEP_EP_CONTROL_PORTS "
      "gives a range of ports, DEEP_EP_SOCKET_IFNAME the interface",
      member.rank, whom, where, settings_.connect_s, peer.error == 0 ? "no answer" : errno_text(peer.error));
}

const Plane::Member& Plane::member(int number) const {
  return *std::ranges::find_if(members_, [&](const Member& one) { return one.number == number; });
}

Message Plane::about(const Member& member, MessageType type) const {
  return {.type = type, .buffer = member.buffer, .round = member.round, .rank = member.rank};
}

void Plane::leave(int number) {
  std::unique_lock lock(mutex_);
  const auto place = std::ranges::find_if(members_, [&](const Member& one) { return one.number == number; });
  look_for_end(*place);
  broadcast(about(*place, MessageType::left));
  // This process may be about to end, and a connection to be down: a goodbye that is lost makes the end a death.
  for (const auto until = Clock::now() + kMostOfAGoodbye; !home_.left() && Clock::now() < until;) {
    if (std::ranges::none_of(peers_, [&](const auto& one) { return still_to_hear(*place, one.second); })) break;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    lock.lock();
  }
  members_.erase(place);
}

bool Plane::still_to_hear(const Member& member, const Peer& peer) {
  for (const Rank& rank : member.ranks) {
    if (!(rank.process == peer.info.process) || rank.left || rank.lost != kNobody) continue;
    return !peer.ended && !peer.by_unix && (peer.link != Link::up || !peer.unsent.empty() || !has_arrived(peer.socket));
  }
  return false;
}

int Plane::lost_for(int number, int rank) const {
  const std::lock_guard lock(mutex_);
  const Member& member = this->member(number);
  return rank >= 0 && rank < member.size() ? member.at(rank).lost : kNobody;
}

std::vector<int> Plane::gone(int number) const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  const Member& member = this->member(number);
  for (int rank = 0; rank < member.size(); ++rank) {
    if (is_gone(member.at(rank))) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<LostRank> Plane::verdicts(int number) const {
  const std::lock_guard lock(mutex_);
  return member(number).verdicts;
}

void Plane::leave_out(int number, int rank, bool on) {
  const std::lock_guard lock(mutex_);
  const Member& member = this->member(number);
  if (leaves_out(member, member.rank, rank) == on) return;
  Message message = about(member, MessageType::leaves_out);
  message.peer = rank;
  message.flag = on ? 1 : 0;
  broadcast(message);
}

void Plane::arrive(int number) {
  const std::lock_guard lock(mutex_);
  broadcast(about(member(number), MessageType::arrived));
}

std::vector<int> Plane::awaited_at_end(int number) const {
  const std::lock_guard lock(mutex_);
  const Member& member = this->member(number);
  std::vector<int> ranks;
  if (member.at(member.rank).lost != kNobody) return ranks;  // the others do not wait, either
  for (int rank = 0; rank < member.size(); ++rank) {
    const Rank& one = member.at(rank);
    const bool left_out = leaves_out(member, member.rank, rank);
    if (!one.arrived && !one.left && one.lost == kNobody && !left_out) ranks.push_back(rank);
  }
  return ranks;
}

void Plane::resume(int number) {
  const std::lock_guard lock(mutex_);
  Member& member = this->member(number);
  ++member.round;
  for (Rank& rank : member.ranks) {
    rank.lost = kNobody;
    rank.own = {};
    rank.facts.gone = false;  // judged again below
  }
  member.verdicts.clear();
  member.waits.clear();
  member.failed.clear();
  member.left_out.clear();
  member.since = {};
  member.told = false;
  for (const std::span<std::uint32_t> words : {member.words.lost, member.words.failed}) {
    for (std::uint32_t& word : words) __atomic_store_n(&word, 0, __ATOMIC_RELAXED);
  }
  __atomic_fetch_add(member.words.changes, 1, __ATOMIC_RELEASE);
  for (const Message& message : std::exchange(member.early, {})) apply_to(member, message);
  judge_member(member);
  wake();
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
    for (const Caller& caller : callers_) {
      if (!caller.trusted) add(caller.socket, POLLIN);
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
  callers_.remove_if([&](Caller& one) { return !one.trusted && ready.contains(one.socket.get()) && !read_hello(one); });
  // Last: a new socket may get the number of a descriptor that was closed above.
  if (unix_listener_ && ready.contains(unix_listener_.get())) accept_from(unix_listener_.get(), true);
  if (tcp_.socket && ready.contains(tcp_.socket.get())) accept_from(tcp_.socket.get(), false);
}

}  // namespace deep_ep::control
