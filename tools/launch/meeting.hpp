// How the launchers of several nodes find each other over TCP.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep::tools {

/// On all addresses of this host. SystemError where the port cannot be had.
UniqueFd listen_on(int port);

/// A caller, if one is there.
UniqueFd accept_caller(const UniqueFd& listener);

/// Calls until somebody answers: the name may be unknown yet, and who it names may start later. `note(why)` is told now
/// and then what it waits for. Nothing when `give_up()` says so; TimeoutError after `timeout_s`.
UniqueFd call_until_answered(const std::string& host, int port, double timeout_s, const std::function<bool()>& give_up,
                             const std::function<void(const std::string& why)>& note);

/// Looks a name up again and again, until it is known or nobody else holds the answer any more.
std::shared_ptr<const std::atomic<bool>> watch_for_name(const std::string& host);

/// What this host calls itself.
std::string own_host_name();

}  // namespace deep_ep::tools
