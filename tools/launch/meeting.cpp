#include "tools/launch/meeting.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "csrc/bootstrap/socket.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

struct Lookup {
  AddressList addresses{nullptr, &::freeaddrinfo};
  int error = 0;
  std::atomic<bool> over = false;
};

AddressList find_addresses(const std::string& host, int port, int& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (host.empty() ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  error = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  return {error == 0 ? found : nullptr, &::freeaddrinfo};
}

/// One round over all addresses of a host, so that neither a slow name server nor a silent host keeps this process from
/// being ended.
class Caller {
 public:
  Caller(const std::string& host, int port, const Deadline& deadline, const std::function<bool()>& give_up)
      : host_(host), port_(port), deadline_(deadline), give_up_(give_up) {}

  UniqueFd call() {
    const auto lookup = look_up();
    if (!lookup) return {};
    if (lookup->error != 0) {
      why_ = fmt::format("'{}' is not known: {}", host_, ::gai_strerror(lookup->error));
      return {};
    }
    for (const addrinfo* one = lookup->addresses.get(); one != nullptr; one = one->ai_next) {
      if (UniqueFd socket = connect_to(*one)) return socket;
    }
    return {};
  }
  const std::string& why() const { return why_; }

 private:
  bool is_over() const { return give_up_() || deadline_.expired(); }

  std::shared_ptr<Lookup> look_up() const {
    auto lookup = std::make_shared<Lookup>();
    std::thread([lookup, host = host_, port = port_] {
      lookup->addresses = find_addresses(host, port, lookup->error);
      lookup->over = true;
    }).detach();
    while (!lookup->over) {
      if (is_over()) return nullptr;
      ::poll(nullptr, 0, 5);
    }
    return lookup;
  }

  UniqueFd connect_to(const addrinfo& address) {
    UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int error = 0;
    if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) != 0) error = errno;
    if (error == EINPROGRESS) {
      const Deadline patience(2);  // an address that nobody has does not answer at all
      pollfd ready{.fd = socket.get(), .events = POLLOUT, .revents = 0};
      while (::poll(&ready, 1, 50) <= 0 && !is_over() && !patience.expired()) {
      }
      socklen_t length = sizeof error;
      error = ETIMEDOUT;
      if (ready.revents != 0) ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (error == 0 && has_called_itself(socket.get())) {
      // Closed without a trace, which would keep the port from whoever shall listen there.
      const linger none{.l_onoff = 1, .l_linger = 0};
      ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
      error = ECONNREFUSED;
    }
    if (error == 0) return socket;
    why_ = errno_text(error);
    return {};
  }

  const std::string& host_;
  int port_;
  const Deadline& deadline_;
  const std::function<bool()>& give_up_;
  std::string why_;
};

}  // namespace

UniqueFd listen_on(int port) {
  int refusal = 0;
  const AddressList addresses = find_addresses("", port, refusal);
  // IPv6 first: such a socket takes calls by IPv4, too.
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
      if (one->ai_family != family) continue;
      UniqueFd listener(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      const int yes = 1;
      const int no = 0;
      ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      if (family == AF_INET6) ::setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
      if (::bind(listener.get(), one->ai_addr, one->ai_addrlen) == 0 && ::listen(listener.get(), 128) == 0) {
        return listener;
      }
      refusal = errno;
    }
  }
  fail<SystemError>("launch: cannot listen for the other nodes on port {}: {}", port, errno_text(refusal));
}

UniqueFd accept_caller(const UniqueFd& listener) {
  return UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

UniqueFd call_until_answered(const std::string& host, int port, double timeout_s, const std::function<bool()>& give_up,
                             const std::function<void(const std::string& why)>& note) {
  const Deadline deadline(timeout_s);
  std::optional<Deadline> quiet;
  std::string why = "no answer";
  while (!give_up()) {
    Caller caller(host, port, deadline, give_up);
    if (UniqueFd socket = caller.call()) {
      const int yes = 1;
      ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
      return socket;
    }
    if (!caller.why().empty()) why = caller.why();  // the last round may have been cut short
    if (deadline.expired()) {
      fail<TimeoutError>("launch: called the first node at {} port {} for {} s: {}", host, port, timeout_s, why);
    }
    if (!quiet || quiet->expired()) {
      note(why);
      quiet.emplace(30);
    }
    ::poll(nullptr, 0, 100);
  }
  return {};
}

std::shared_ptr<const std::atomic<bool>> watch_for_name(const std::string& host) {
  auto known = std::make_shared<std::atomic<bool>>(false);
  std::thread([known, host] {
    constexpr auto kPause = std::chrono::milliseconds(100);
    for (int error = 1; known.use_count() > 1;) {
      const AddressList addresses = find_addresses(host, 1, error);
      if (error == 0) break;
      std::this_thread::sleep_for(kPause);
    }
    *known = true;
  }).detach();
  return known;
}

std::string own_host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace deep_ep::tools
