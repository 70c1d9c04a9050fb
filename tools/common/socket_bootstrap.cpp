#include "tools/common/socket_bootstrap.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/bootstrap/polled.hpp"
#include "csrc/bootstrap/sockets.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/token.hpp"
#include "csrc/support/unique_fd.hpp"
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

constexpr auto kTick = std::chrono::milliseconds(5);  ///< between looks at those that are to speak

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

/// Rank 0 hears all others, and tells each what all of them said.
class TcpTransport {
 public:
  static constexpr const char* name = "TCP";
  static constexpr bool kIsWrittenTo = false;
  const int rank, size;

  TcpTransport(int of_rank, int of_size, const std::string& hub, std::uint16_t port, double timeout_s, const Token& job)
      : rank(of_rank),
        size(of_size),
        own_{.rank = rank, .size = size, .job = job},
        peers_(static_cast<std::size_t>(rank == 0 ? size : 1)) {
    if (size == 1) return;
    const Deadline deadline(timeout_s);
    rank == 0 ? listen(port, deadline) : call(hub, port, deadline);
  }

  void gather(std::span<const std::byte> mine, std::span<std::byte> all, const RankWait& wait) {
    if (rank != 0) {
      peers_[0].send(mine.data(), mine.size());
      wait.until([&] { return has_come(peers_[0], all.size()) ? "" : "rank 0"; });
      peers_[0].take_bytes(all);
      return;
    }
    wait.until([&] { return late(mine.size()); });
    std::ranges::copy(mine, all.begin());
    for (std::size_t peer = 1; peer < peers_.size(); ++peer) {
      peers_[peer].take_bytes(all.subspan(peer * mine.size(), mine.size()));
    }
    for (std::size_t peer = 1; peer < peers_.size(); ++peer) {  // in turn: each has a copy of what it has not taken yet
      peers_[peer].send(all.data(), all.size());
      wait.until([&] { return has_come(peers_[peer], 0) ? "" : fmt::format("rank {}", peer); });
    }
  }

 private:
  /// Have so many bytes come, and was all that was sent taken?
  static bool has_come(Connection& peer, std::size_t bytes) {
    if (!peer.unsent.empty()) peer.send();
    while (peer.received.size() < bytes || !peer.unsent.empty()) {
      const std::size_t before = peer.received.size();
      const int error = peer.receive();
      if (error != 0) fail<SystemError>("bootstrap over TCP: a rank went away: {}", errno_text(error));
      if (peer.received.size() == before) return false;
    }
    return true;
  }

  std::string late(std::size_t bytes) {
    std::vector<int> ranks;
    for (int peer = 1; peer < size; ++peer) {
      if (!has_come(peers_[static_cast<std::size_t>(peer)], bytes)) ranks.push_back(peer);
    }
    return ranks.empty() ? "" : format_ranks(ranks);
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

  /// All callers are listened to at the same time: a silent one does not delay the others.
  void listen(std::uint16_t port, const Deadline& deadline) {
    const UniqueFd listener = open_listener(port);
    std::vector<Connection> callers;
    for (std::size_t missing = peers_.size() - 1; missing != 0; std::this_thread::sleep_for(kTick)) {
      if (deadline.expired()) {
        fail<TimeoutError>("bootstrap over TCP: rank {} waited {} s for the others to call", rank, deadline.seconds());
      }
      while (UniqueFd socket{::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)}) {
        callers.push_back({std::move(socket)});
      }
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
        fail<SystemError>("bootstrap over TCP: cannot take a call on port {}: {}", port, errno_text(errno));
      }
      std::erase_if(callers, [&](Connection& caller) {
        Hello hello;
        if (caller.receive() != 0) return true;
        if (!caller.take(hello)) return false;
        missing -= admit(caller, hello, port) ? 1 : 0;
        return true;
      });
    }
  }

  /// Is it a rank of this job? Strangers must not end what others wait for, whatever they say.
  bool admit(Connection& caller, const Hello& hello, std::uint16_t port) {
    const auto who = static_cast<std::size_t>(hello.rank);
    if (hello.magic == own_.magic) caller.send(&own_, sizeof own_);  // also one of another job shall know
    if (!own_.same_job(hello) || hello.rank <= 0 || who >= peers_.size() || peers_[who].socket) {
      log::warn("bootstrap over TCP: whoever called on port {} is no rank of this group{}; waiting for another caller",
                port, why_not(hello));
      return false;
    }
    require_version(hello);
    peers_[who] = std::move(caller);
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

  /// Later messages of a job differ from version to version.
  void require_version(const Hello& other) const {
    if (other.version == own_.version) return;
    fail<RankMismatch>("bootstrap over TCP: rank {} runs deep_ep {}, rank {} runs {}", rank, DEEP_EP_VERSION,
                       other.rank, other.version_text());
  }

  void call(const std::string& hub, std::uint16_t port, const Deadline& deadline) {
    const AddressList addresses = find_addresses(hub, port);
    for (int refusal = 0;; std::this_thread::sleep_for(std::chrono::milliseconds(100))) {
      for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
        Connection to{UniqueFd(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0))};
        const timeval most{.tv_sec = 2, .tv_usec = 0};  // an address without an owner does not answer at all
        ::setsockopt(to.socket.get(), SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
        if (::connect(to.socket.get(), one->ai_addr, one->ai_addrlen) != 0) {
          refusal = errno == EINPROGRESS ? ETIMEDOUT : errno;  // the first is what SO_SNDTIMEO gives
          continue;
        }
        to.send(&own_, sizeof own_);
        Hello hello;
        for (; !has_come(to, sizeof hello); std::this_thread::sleep_for(kTick)) {
          if (!deadline.expired()) continue;
          fail<TimeoutError>("bootstrap over TCP: rank {} waited {} s for a rank's word", rank, deadline.seconds());
        }
        to.take(hello);
        if (own_.same_job(hello) && hello.rank == rank) {
          // A call to a port without a listener meets itself if the system gave it that very port to call from.
          const linger at_once{.l_onoff = 1, .l_linger = 0};  // rank 0 must get the port
          ::setsockopt(to.socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
          refusal = ECONNREFUSED;
          continue;
        }
        if (!own_.same_job(hello) || hello.rank != 0) {
          fail<SystemError>("bootstrap over TCP: whoever listens at {} port {} is not rank 0 of this group{}", hub,
                            port, why_not(hello));
        }
        require_version(hello);
        peers_[0] = std::move(to);
        return;
      }
      if (!deadline.expired()) continue;
      fail<TimeoutError>("bootstrap over TCP: rank {} called rank 0 at {} port {} for {} s: {}", rank, hub, port,
                         deadline.seconds(), errno_text(refusal));
    }
  }

  const Hello own_;
  std::vector<Connection> peers_;  ///< of rank 0: [rank], the first unused; of the others: rank 0
};

}  // namespace

std::shared_ptr<Bootstrap> make_socket_bootstrap(int rank, int size, const std::string& hub, std::uint16_t port,
                                                 double timeout_s, const Token& job) {
  require_rank(rank, size);
  return make_polled_bootstrap(std::make_unique<TcpTransport>(rank, size, hub, port, timeout_s, job), timeout_s);
}

}  // namespace deep_ep
