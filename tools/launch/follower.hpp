// The launcher of a node that is not the first.
#pragma once

#include "csrc/support/unique_fd.hpp"
#include "tools/launch/options.hpp"
#include "tools/launch/schedulers.hpp"

namespace deep_ep::tools {

/// Joins the first launcher over TCP, starts this node's ranks when it says so, and ends with the status of the run.
int follow_by_tcp(const LaunchOptions& options, const Place& place);

/// The same over standard input and output, as ssh leads them to the first launcher, which also gets what ranks print.
int follow_by_ssh(const LaunchOptions& options);

}  // namespace deep_ep::tools
