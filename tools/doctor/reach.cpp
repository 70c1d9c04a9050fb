#include "tools/doctor/reach.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep::tools {
namespace {

using Addresses = std::unique_ptr<::addrinfo, decltype(&::freeaddrinfo)>;

struct Resolved {
  int error = 0;
  Addresses addresses{nullptr, ::freeaddrinfo};
};

// In a thread of its own, which nobody waits for: a resolver may take a minute to give up.
std::future<Resolved> resolve(const std::string& host, const std::string& port) {
  auto promise = std::make_shared<std::promise<Resolved>>();
  std::future<Resolved> result = promise->get_future();
  std::thread([promise, host, port] {
    ::addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    ::addrinfo* list = nullptr;
    Resolved resolved;
    resolved.error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &list);
    if (resolved.error == 0) resolved.addresses.reset(list);
    promise->set_value(std::move(resolved));
  }).detach();
  return result;
}

std::string text_of(const ::addrinfo& address) {
  std::array<char, NI_MAXHOST> text{};
  const int error =
      ::getnameinfo(address.ai_addr, address.ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

Reach::Outcome call(const ::addrinfo& address, double seconds) {
  const UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.get() < 0) return Reach::Outcome::silent;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return Reach::Outcome::reached;
  if (errno != EINPROGRESS) return errno == ECONNREFUSED ? Reach::Outcome::refused : Reach::Outcome::silent;
  ::pollfd wait{socket.get(), POLLOUT, 0};
  if (::poll(&wait, 1, static_cast<int>(seconds * 1000)) <= 0) return Reach::Outcome::silent;
  int error = 0;
  ::socklen_t size = sizeof error;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error == 0              ? Reach::Outcome::reached
         : error == ECONNREFUSED ? Reach::Outcome::refused
                                 : Reach::Outcome::silent;
}

}  // namespace

Reach try_to_reach(const std::string& host, const std::string& port, double seconds) {
  Reach reach;
  std::future<Resolved> answer = resolve(host, port);
  if (answer.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready) {
    reach.problem = "the name server does not answer";
    return reach;
  }
  const Resolved resolved = answer.get();
  if (resolved.error != 0 || !resolved.addresses) {
    reach.problem = ::gai_strerror(resolved.error);
    return reach;
  }
  // One that answers will do: names often have IPv6 addresses that lead nowhere.
  int addresses = 0;
  for (const ::addrinfo* one = resolved.addresses.get(); one != nullptr; one = one->ai_next) ++addresses;
  for (const ::addrinfo* one = resolved.addresses.get(); one != nullptr; one = one->ai_next) {
    const Reach::Outcome outcome = call(*one, seconds / addresses);
    const bool is_better = outcome == Reach::Outcome::reached ||
                           (outcome == Reach::Outcome::refused && reach.outcome != Reach::Outcome::refused);
    if (!is_better && !reach.address.empty()) continue;
    reach.address = text_of(*one);
    reach.outcome = outcome;
    if (outcome == Reach::Outcome::reached) break;
  }
  return reach;
}

}  // namespace deep_ep::tools
