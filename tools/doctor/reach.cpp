#include "tools/doctor/reach.hpp"

#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "csrc/support/deadline.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/calling.hpp"

namespace deep_ep::tools {
namespace {

std::string text_of(const ::addrinfo& address) {
  std::array<char, NI_MAXHOST> text{};
  const int error =
      ::getnameinfo(address.ai_addr, address.ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

/// Of a wrong variable another check complains.
SocketChoice choice_of_process() {
  try {
    return read_socket_choice();
  } catch (const InvalidArgument&) {
    return {};
  }
}

Reach::Outcome call(const ::addrinfo& address, double seconds) {
  const auto go_on = [] { return true; };
  int error = 0;
  if (connect_to(address, choice_of_process(), seconds, go_on, error)) return Reach::Outcome::reached;
  return error == ECONNREFUSED ? Reach::Outcome::refused : Reach::Outcome::silent;
}

}  // namespace

Reach try_to_reach(const std::string& host, const std::string& port, double seconds) {
  Reach reach;
  const Deadline patience(seconds);
  const auto lookup = look_up(host, port, AF_UNSPEC, [&] { return !patience.expired(); });
  if (!lookup) {
    reach.problem = "the name server does not answer";
    return reach;
  }
  if (!lookup->addresses) {
    reach.problem = ::gai_strerror(lookup->error);
    return reach;
  }
  // One that answers will do: names often have IPv6 addresses that lead nowhere.
  int addresses = 0;
  for (const ::addrinfo* one = lookup->addresses.get(); one != nullptr; one = one->ai_next) ++addresses;
  for (const ::addrinfo* one = lookup->addresses.get(); one != nullptr; one = one->ai_next) {
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
