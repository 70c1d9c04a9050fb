// How a launcher is started on another host.
#pragma once

#include <string>
#include <vector>

#include "tools/launch/hostfile.hpp"
#include "tools/launch/options.hpp"

namespace deep_ep::tools {

/// What the other hosts call the first one. InvalidArgument where that is a name of this host alone.
std::string address_of(const std::vector<Host>& hosts);

/// The words of ssh's command line. The shell there is whatever the user has.
std::vector<std::string> remote_shell(const LaunchOptions& options, const Host& host);

}  // namespace deep_ep::tools
