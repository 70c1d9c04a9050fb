#include "tools/common/socket_bootstrap.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/bootstrap/sockets.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/token.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/version.hpp"

namespace deep_ep {
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
constexpr int kTick = 5;                  ///< ms

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList find_addresses(const std::string& host, std::uint16_t port) {
  const std::string family = environment::text("DEEP_EP_SOCKET_FAMILY");
  addrinfo hints{};
  hints.ai_family = family == "AF_INET" ? AF_INET : family == "AF_INET6" ? AF_INET6 : AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
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
      send(peers_[0], mine, deadline);
      receive(peers_[0], all, deadline);
      return;
    }
    std::memcpy(all.data(), mine.data(), bytes);
    for (std::size_t peer = 1; peer < peers_.size(); ++peer) {
      receive(peers_[peer], all.subspan(peer * bytes, bytes), deadline);
    }
    for (std::size_t peer = 1; peer < peers_.size(); ++peer) send(peers_[peer], all, deadline);
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

  void send(const UniqueFd& to, std::span<const std::byte> bytes, const Deadline& deadline) const {
    while (!bytes.empty()) {
      wait(to.get(), POLLOUT, "a rank to listen", deadline);
      const ssize_t sent = ::send(to.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        bytes = bytes.subspan(static_cast<std::size_t>(sent));
      } else if (errno != EAGAIN && errno != EINTR) {
        fail<SystemError>("bootstrap over TCP: a rank went away: {}", errno_text(errno));
      }
    }
  }

  void receive(const UniqueFd& from, std::span<std::byte> bytes, const Deadline& deadline) const {
    while (!bytes.empty()) {
      wait(from.get(), POLLIN, "a rank's word", deadline);
      bytes = bytes.subspan(receive_some(from.get(), bytes));
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
    SocketAddress any{.size = sizeof(sockaddr_in6), .at = {}};
    any.at.ss_family = AF_INET6;                                    // such a socket takes calls by IPv4, too
    reinterpret_cast<sockaddr_in&>(any.at).sin_port = htons(port);  // at the same place in both families
    UniqueFd listener = listen_at(any);
    if (!listener) {
      any.size = sizeof(sockaddr_in);
      any.at.ss_family = AF_INET;
      listener = listen_at(any);
    }
    if (!listener) fail<SystemError>("bootstrap over TCP: cannot listen on port {}: {}", port, errno_text(errno));
    return listener;
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
      if (deadline.expired()) {
        fail<TimeoutError>("bootstrap over TCP: rank {} waited {} s for the others to call", rank_, deadline.seconds());
      }
      while (callers.size() < kMostCallers && take_call(listener.get(), port, callers)) {
      }
      std::erase_if(callers, [&](Caller& caller) {
        const std::optional<bool> ours = settle(caller, port);
        missing -= ours.value_or(false) ? 1 : 0;
        return ours.has_value();
      });
      ::poll(nullptr, 0, kTick);
    }
  }

  /// False: there is none.
  static bool take_call(int listener, std::uint16_t port, std::vector<Caller>& callers) {
    UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket && errno == EAGAIN) return false;
    if (!socket && errno != EINTR && errno != ECONNABORTED) {
      fail<SystemError>("bootstrap over TCP: cannot take a call on port {}: {}", port, errno_text(errno));
    }
    if (socket) callers.push_back({.socket = std::move(socket)});
    return true;
  }

  /// Is it a rank of this job? Nothing as long as it has not said it. Strangers must not end what others wait for,
  /// whatever they say.
  std::optional<bool> settle(Caller& caller, std::uint16_t port) {
    const Hello& hello = caller.hello;
    try {
      caller.heard +=
          receive_some(caller.socket.get(), std::as_writable_bytes(std::span(&caller.hello, 1)).subspan(caller.heard));
      if (caller.heard < sizeof hello && !caller.brief.expired()) return std::nullopt;
      if (caller.heard < sizeof hello) {
        fail<TimeoutError>("bootstrap over TCP: rank {} waited {} s for a rank's word", rank_, caller.brief.seconds());
      }
      const auto who = static_cast<std::size_t>(hello.rank);
      const bool ours = own_.same_job(hello) && hello.rank > 0 && who < peers_.size() && !peers_[who];
      if (hello.magic == own_.magic) greet(caller.socket, caller.brief);  // one of another job shall know that
      if (!ours) {
        fail<SystemError>("bootstrap over TCP: whoever called on port {} is no rank of this group{}", port,
                          why_not(hello));
      }
    } catch (const Error& error) {
      log::warn("{}; waiting for another caller", error.what());
      return false;
    }
    require_version(hello);
    peers_[static_cast<std::size_t>(hello.rank)] = std::move(caller.socket);
    return true;
  }

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

  void greet(const UniqueFd& socket, const Deadline& deadline) const {
    send(socket, std::as_bytes(std::span(&own_, 1)), deadline);
  }

  /// Later messages of a job differ from version to version.
  void require_version(const Hello& other) const {
    if (other.version == own_.version) return;
    fail<RankMismatch>("bootstrap over TCP: rank {} runs deep_ep {}, rank {} runs {}", rank_, DEEP_EP_VERSION,
                       other.rank, other.version_text());
  }

  void call(const std::string& hub, std::uint16_t port) {
    const Deadline deadline(timeout_s_);
    const AddressList addresses = find_addresses(hub, port);
    for (int refusal = 0;; std::this_thread::sleep_for(std::chrono::milliseconds(100))) {
      for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
        UniqueFd socket(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
        const timeval most{.tv_sec = 2, .tv_usec = 0};  // an address without an owner does not answer at all
        ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
        if (::connect(socket.get(), one->ai_addr, one->ai_addrlen) != 0) {
          refusal = errno == EINPROGRESS ? ETIMEDOUT : errno;  // the first is what SO_SNDTIMEO gives
          continue;
        }
        greet(socket, deadline);
        Hello hello{.magic = 0};
        receive(socket, std::as_writable_bytes(std::span(&hello, 1)), deadline);
        if (own_.same_job(hello) && hello.rank == rank_) {
          // A call to a port without a listener meets itself if the system gave it that very port to call from.
          const linger at_once{.l_onoff = 1, .l_linger = 0};  // rank 0 must get the port
          ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
          refusal = ECONNREFUSED;
          continue;
        }
        if (!own_.same_job(hello) || hello.rank != 0) {
          fail<SystemError>("bootstrap over TCP: whoever listens at {} port {} is not rank 0 of this group{}", hub,
                            port, why_not(hello));
        }
        require_version(hello);
        peers_[0] = std::move(socket);
        return;
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
