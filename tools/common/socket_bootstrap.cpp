#include "tools/common/socket_bootstrap.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/token.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/version.hpp"

namespace deep_ep {

bool has_called_itself(int socket) {
  sockaddr_storage own{};
  sockaddr_storage other{};
  socklen_t own_size = sizeof own;
  socklen_t other_size = sizeof other;
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(socket, reinterpret_cast<sockaddr*>(&other), &other_size) == 0 && own_size == other_size &&
         std::memcmp(&own, &other, own_size) == 0;
}

namespace {

/// Would the system call from an interface that may be used? A list of those that may not ("^docker") leaves many, of
/// which most do not lead there.
bool route_is_allowed(const addrinfo& to, const SocketChoice& choice, std::span<const InterfaceAddress> addresses) {
  const UniqueFd probe(::socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (::connect(probe.get(), to.ai_addr, to.ai_addrlen) != 0) return false;  // sends nothing
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  if (::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&from), &size) != 0) return false;
  return std::ranges::any_of(addresses, [&](const InterfaceAddress& one) {
    if (one.address.ss_family != from.ss_family || !choice.interfaces->matches(one.interface)) return false;
    if (from.ss_family == AF_INET) {
      return reinterpret_cast<const sockaddr_in&>(one.address).sin_addr.s_addr ==
             reinterpret_cast<const sockaddr_in&>(from).sin_addr.s_addr;
    }
    return std::memcmp(&reinterpret_cast<const sockaddr_in6&>(one.address).sin6_addr,
                       &reinterpret_cast<const sockaddr_in6&>(from).sin6_addr, sizeof(in6_addr)) == 0;
  });
}

}  // namespace

void leave_by_chosen_interface(int socket, const addrinfo& to, const SocketChoice& choice) {
  if (!choice.interfaces) return;
  const int family = to.ai_family;
  const std::vector<InterfaceAddress> addresses = interface_addresses();
  if (route_is_allowed(to, choice, addresses)) return;
  const InterfaceAddress* from = choice.find(addresses, family);
  // The port is the system's choice, as without this.
  if (from != nullptr && ::bind(socket, reinterpret_cast<const sockaddr*>(&from->address), from->size) == 0) return;
  static std::atomic<bool> said = false;
  if (said.exchange(true)) return;
  log::warn("{}: no interface of that name has an {} address to call from; the route to the other side decides",
            choice.variable, family == AF_INET6 ? "IPv6" : "IPv4");
}

namespace {

/// The first thing that both sides of a connection say. It is laid out like this in all versions, so that they can tell
/// each other.
struct Hello {
  std::uint64_t magic = 0x64656570'65702033;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::array<char, 32> version = {DEEP_EP_VERSION};
  Token job = {};

  bool same_job(const Hello& other) const { return magic == other.magic && size == other.size && job == other.job; }
  std::string version_text() const { return {version.data(), ::strnlen(version.data(), version.size())}; }
};

constexpr double kMostOfACaller = 2;      ///< seconds for a caller to say who it is
constexpr std::size_t kMostCallers = 64;  ///< that may be saying it at a time; more wait in the system's queue
constexpr int kQueue = 1024;              ///< of the system, so that a rank can call where strangers wait, too
constexpr auto kTick = std::chrono::milliseconds(50);

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// Of `host`; empty: this machine's, to listen on.
AddressList find_addresses(const std::string& host, std::uint16_t port, int family = AF_UNSPEC) {
  addrinfo hints{};
  hints.ai_family = family;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (host.empty() ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) fail<SystemError>("bootstrap over TCP: '{}' is not an address: {}", host, ::gai_strerror(error));
  return {found, &::freeaddrinfo};
}

/// [rank]: who rank 0 talks to; the others know rank 0 alone.
class Sockets {
 public:
  Sockets(int rank, int size, const std::string& hub, std::uint16_t port, double timeout_s, const Token& job)
      : own_{.rank = rank, .size = size, .job = job},
        rank_(rank),
        timeout_s_(timeout_s),
        peers_(static_cast<std::size_t>(size)) {
    if (size == 1) return;
    rank == 0 ? listen(port) : call(hub, port);
  }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
    // After a failure a rank does not know where in the conversation the others are.
    if (broken_) std::rethrow_exception(broken_);
    try {
      exchange(mine, all);
    } catch (...) {
      broken_ = std::current_exception();
      throw;
    }
  }

 private:
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) const {
    const Deadline deadline(timeout_s_);
    const std::size_t bytes = mine.size();
    if (bytes == 0) return;
    if (rank_ != 0) {
      send(0, mine, deadline);
      receive(0, all, deadline);
      return;
    }
    std::memcpy(all.data(), mine.data(), bytes);
    for (std::size_t peer = 1; peer < peers_.size(); ++peer) receive(peer, all.subspan(peer * bytes, bytes), deadline);
    for (std::size_t peer = 1; peer < peers_.size(); ++peer) send(peer, all, deadline);
  }

  void wait(int descriptor, short events, const char* what, const Deadline& deadline) const {
    pollfd ready{.fd = descriptor, .events = events, .revents = 0};
    bool there = false;
    while (!there) {
      there = ::poll(&ready, 1, 50) > 0;
      if (!there) WaitEnd::look_now();
      // Also where something is there: a peer that says a byte now and then is late, too.
      if (!deadline.expired()) continue;
      fail<TimeoutError>("bootstrap over TCP: rank {} waited {} s for {}", rank_, deadline.seconds(), what);
    }
  }

  void send(std::size_t to, std::span<const std::byte> bytes, const Deadline& deadline) const {
    send_to(peers_[to].get(), bytes, deadline);
  }
  void receive(std::size_t from, std::span<std::byte> bytes, const Deadline& deadline) const {
    receive_from(peers_[from].get(), bytes, deadline);
  }

  void send_to(int descriptor, std::span<const std::byte> bytes, const Deadline& deadline) const {
    while (!bytes.empty()) {
      wait(descriptor, POLLOUT, "a rank to listen", deadline);
      const ssize_t sent = ::send(descriptor, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        bytes = bytes.subspan(static_cast<std::size_t>(sent));
      } else if (errno != EAGAIN && errno != EINTR) {
        fail<SystemError>("bootstrap over TCP: a rank went away: {}", errno_text(errno));
      }
    }
  }

  void receive_from(int descriptor, std::span<std::byte> bytes, const Deadline& deadline) const {
    while (!bytes.empty()) {
      wait(descriptor, POLLIN, "a rank's word", deadline);
      bytes = bytes.subspan(receive_some(descriptor, bytes));
    }
  }

  /// As many bytes as are there.
  static std::size_t receive_some(int descriptor, std::span<std::byte> bytes) {
    const ssize_t received = ::recv(descriptor, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (received == 0) throw SystemError("bootstrap over TCP: a rank went away: it closed the connection");
    if (received > 0) return static_cast<std::size_t>(received);
    if (errno == EAGAIN || errno == EINTR) return 0;
    fail<SystemError>("bootstrap over TCP: a rank went away: {}", errno_text(errno));
  }

  static UniqueFd open_listener(std::uint16_t port) {
    int refusal = 0;
    const AddressList addresses = find_addresses("", port);
    // IPv6 first: such a socket takes calls by IPv4, too.
    for (const int family : {AF_INET6, AF_INET}) {
      for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
        if (one->ai_family != family) continue;
        UniqueFd listener(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        const int yes = 1;
        const int no = 0;
        ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        if (family == AF_INET6) ::setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
        if (::bind(listener.get(), one->ai_addr, one->ai_addrlen) == 0 && ::listen(listener.get(), kQueue) == 0) {
          return listener;
        }
        refusal = errno;
      }
    }
    fail<SystemError>("bootstrap over TCP: cannot listen on port {}: {}", port, errno_text(refusal));
  }

  /// A caller that may not have identified itself yet.
  struct Caller {
    UniqueFd socket;
    Deadline brief{kMostOfACaller};
    Hello hello{.magic = 0};
    std::size_t heard = 0;  ///< bytes of the hello
  };

  /// All callers are listened to at the same time: a silent one does not delay the others.
  void listen(std::uint16_t port) {
    const Deadline deadline(timeout_s_);
    const UniqueFd listener = open_listener(port);
    std::vector<Caller> callers;
    for (std::size_t missing = peers_.size() - 1; missing != 0;) {
      const int for_calls = callers.size() < kMostCallers ? listener.get() : -1;
      std::vector<pollfd> sources{{.fd = for_calls, .events = POLLIN, .revents = 0}};
      for (const Caller& caller : callers) {
        sources.push_back({.fd = caller.socket.get(), .events = POLLIN, .revents = 0});
      }
      ::poll(sources.data(), sources.size(), static_cast<int>(kTick.count()));
      std::vector<Caller> waiting;
      for (std::size_t i = 0; i < callers.size(); ++i) {
        Caller& caller = callers[i];
        if (!hear(caller, sources[i + 1].revents != 0)) continue;
        if (caller.heard < sizeof(Hello)) {
          waiting.push_back(std::move(caller));
        } else if (welcome(std::move(caller), port)) {
          --missing;
        }
      }
      callers = std::move(waiting);
      if (sources[0].revents != 0) take_call(listener.get(), port, callers);
      if (missing != 0 && deadline.expired()) {
        fail<TimeoutError>("bootstrap over TCP: rank {} waited {} s for the others to call", rank_, deadline.seconds());
      }
    }
  }

  static void take_call(int listener, std::uint16_t port, std::vector<Caller>& callers) {
    UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (socket) {
      callers.push_back({.socket = std::move(socket)});
    } else if (errno != EINTR && errno != EAGAIN && errno != ECONNABORTED) {
      fail<SystemError>("bootstrap over TCP: cannot take a call on port {}: {}", port, errno_text(errno));
    }
  }

  /// Reads the bytes that a caller has sent since. False: the caller is refused.
  bool hear(Caller& caller, bool says_something) const {
    try {
      const auto missing = std::as_writable_bytes(std::span(&caller.hello, 1)).subspan(caller.heard);
      if (says_something) caller.heard += receive_some(caller.socket.get(), missing);
      if (caller.heard == sizeof(Hello) || !caller.brief.expired()) return true;
      fail<TimeoutError>("bootstrap over TCP: rank {} waited {} s for a rank's word", rank_, caller.brief.seconds());
    } catch (const Error& error) {
      leave_out(error);
      return false;
    }
  }

  static void leave_out(const Error& error) { log::warn("{}; waiting for another caller", error.what()); }

  /// ", but of another job", for a hello of deep_ep.
  std::string why_not(const Hello& hello) const {
    if (hello.magic != own_.magic) return {};
    if (hello.version != own_.version) {
      return fmt::format(", and runs deep_ep {}, not {}", hello.version_text(), DEEP_EP_VERSION);
    }
    if (hello.job != own_.job) return ", but of another job (by DEEP_EP_JOB_TOKEN, or what the launcher calls the job)";
    if (hello.size != own_.size) return fmt::format(", but of a group of {}, not of {}", hello.size, own_.size);
    return {};
  }

  /// Is it a rank of this job? Strangers must not end what others wait for, whatever they say.
  bool welcome(Caller stranger, std::uint16_t port) {
    UniqueFd caller = std::move(stranger.socket);
    const Hello& hello = stranger.hello;
    try {
      const auto who = static_cast<std::size_t>(hello.rank);
      const bool ours = own_.same_job(hello) && hello.rank > 0 && who < peers_.size() && !peers_[who];
      if (hello.magic == own_.magic) greet(caller.get(), stranger.brief);  // one of another job shall know that
      if (!ours) {
        fail<SystemError>("bootstrap over TCP: whoever called on port {} is no rank of this group{}", port,
                          why_not(hello));
      }
    } catch (const Error& error) {
      leave_out(error);
      return false;
    }
    require_version(hello);
    peers_[static_cast<std::size_t>(hello.rank)] = std::move(caller);
    return true;
  }

  void greet(int descriptor, const Deadline& deadline) const {
    send_to(descriptor, std::as_bytes(std::span(&own_, 1)), deadline);
  }

  /// Later messages of a job differ from version to version.
  void require_version(const Hello& other) const {
    if (other.version == own_.version) return;
    fail<RankMismatch>("bootstrap over TCP: rank {} runs deep_ep {}, rank {} runs {}", rank_, DEEP_EP_VERSION,
                       other.rank, other.version_text());
  }

  void call(const std::string& hub, std::uint16_t port) {
    const Deadline deadline(timeout_s_);
    const SocketChoice choice = read_socket_choice();
    const AddressList addresses = find_addresses(hub, port, choice.family);
    for (int refusal = 0;; std::this_thread::sleep_for(std::chrono::milliseconds(100))) {
      for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
        UniqueFd socket(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
        const timeval most{.tv_sec = 2, .tv_usec = 0};  // an address without an owner does not answer at all
        ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
        leave_by_chosen_interface(socket.get(), *one, choice);
        if (::connect(socket.get(), one->ai_addr, one->ai_addrlen) == 0) {
          if (has_called_itself(socket.get())) {
            const linger at_once{.l_onoff = 1, .l_linger = 0};  // rank 0 must get the port
            ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
            refusal = ECONNREFUSED;
            continue;
          }
          greet(socket.get(), deadline);
          Hello hello{.magic = 0};
          receive_from(socket.get(), std::as_writable_bytes(std::span(&hello, 1)), deadline);
          if (!own_.same_job(hello) || hello.rank != 0) {
            fail<SystemError>("bootstrap over TCP: whoever listens at {} port {} is not rank 0 of this group{}", hub,
                              port, why_not(hello));
          }
          require_version(hello);
          peers_[0] = std::move(socket);
          return;
        }
        refusal = errno == EINPROGRESS ? ETIMEDOUT : errno;  // the first is what SO_SNDTIMEO gives
      }
      if (!deadline.expired()) continue;
      fail<TimeoutError>("bootstrap over TCP: rank {} called rank 0 at {} port {} for {} s: {}", rank_, hub, port,
                         deadline.seconds(), errno_text(refusal));
    }
  }

  Hello own_;
  int rank_;
  double timeout_s_;
  std::vector<UniqueFd> peers_;
  std::exception_ptr broken_;  ///< the first failure
};

}  // namespace

std::shared_ptr<Bootstrap> make_socket_bootstrap(int rank, int size, const std::string& hub, std::uint16_t port,
                                                 double timeout_s, const Token& job) {
  require_rank(rank, size);
  const auto sockets = std::make_shared<Sockets>(rank, size, hub, port, timeout_s, job);
  return make_callback_bootstrap(rank, size, [sockets](std::span<const std::byte> mine, std::span<std::byte> all) {
    sockets->all_gather(mine, all);
  });
}

}  // namespace deep_ep
