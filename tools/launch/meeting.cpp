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

#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/calling.hpp"

namespace deep_ep::tools {
namespace {

/// One round over all addresses of a host, so that neither a slow name server nor a silent host keeps this process from
/// being ended.
class Caller {
 public:
  Caller(const std::string& host, int port, const Deadline& deadline, const std::function<bool()>& give_up)
      : host_(host), port_(port), deadline_(deadline), give_up_(give_up) {}

  UniqueFd call() {
    const std::function<bool()> go_on = [this] { return !give_up_() && !deadline_.expired(); };
    const auto lookup = look_up(host_, std::to_string(port_), choice_.family, go_on);
    if (!lookup) return {};
    if (lookup->error != 0) {
      why_ = fmt::format("'{}' is not known: {}", host_, ::gai_strerror(lookup->error));
      return {};
    }
    for (const addrinfo* one = lookup->addresses.get(); one != nullptr; one = one->ai_next) {
      constexpr double kPatience = 2;  // seconds: an address that nobody has does not answer at all
      int error = 0;
      if (UniqueFd socket = connect_to(*one, choice_, kPatience, go_on, error)) return socket;
      why_ = errno_text(error);
    }
    return {};
  }
  const std::string& why() const { return why_; }

 private:
  const std::string& host_;
  int port_;
  const Deadline& deadline_;
  const std::function<bool()>& give_up_;
  SocketChoice choice_ = read_socket_choice();
  std::string why_;
};

}  // namespace

UniqueFd listen_on(int port) {
  int refusal = 0;
  const AddressList addresses = find_addresses("", std::to_string(port), AF_UNSPEC, refusal);
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
      const AddressList addresses = find_addresses(host, "1", AF_UNSPEC, error);
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
