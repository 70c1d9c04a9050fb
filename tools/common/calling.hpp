// Names and ports of other machines, such that neither a slow name server nor a silent host keeps this process waiting.
#pragma once

#include <netdb.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::tools {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// Of `host`; empty: this machine's, to listen on. `error` is getaddrinfo()'s, and then the list is null.
AddressList find_addresses(const std::string& host, const std::string& port, int family, int& error);

struct Lookup {
  AddressList addresses{nullptr, &::freeaddrinfo};
  int error = 0;
  std::atomic<bool> over = false;
};
/// In a thread of its own, which nobody waits for. Null once `go_on` says no before the answer has come.
std::shared_ptr<Lookup> look_up(const std::string& host, const std::string& port, int family,
                                const std::function<bool()>& go_on);

/// By an interface that `choice` allows. A connection, or none and why in `error` (ETIMEDOUT: no answer within
/// `seconds`, or `go_on` says no; ECONNREFUSED also for a call that has met itself).
UniqueFd connect_to(const addrinfo& address, const SocketChoice& choice, double seconds,
                    const std::function<bool()>& go_on, int& error);

}  // namespace deep_ep::tools
