// The first launcher: knows all nodes of a run, and decides when and how it ends.
#pragma once

#include "tools/launch/options.hpp"
#include "tools/launch/schedulers.hpp"

namespace deep_ep::tools {

/// All ranks on this host.
int launch_here(const LaunchOptions& options);

/// Starts a launcher on each host of the list by ssh.
int launch_on_hosts(const LaunchOptions& options);

/// This is the first of the nodes on which a scheduler has started launchers; the others come over TCP.
int launch_as_first(const LaunchOptions& options, const Place& place);

}  // namespace deep_ep::tools
