// What the command line of `deep_ep launch` says.
#pragma once

#include <string>
#include <vector>

namespace deep_ep::tools {

struct LaunchOptions {
  std::vector<std::string> command;
  int ranks = 0;  ///< of this host; 0: one for each GPU
  std::string logs;
  double join_timeout = 600;
  double silence = 30;
  std::string master;  ///< empty: as the scheduler or the list of hosts says
  int port = 0;        ///< 0: as the scheduler says, or 29500

  std::string hostfile;
  std::string range;
  std::string order_by;
  std::string ssh = "ssh -o BatchMode=yes";

  std::string scheduler;
  std::string topology;

  bool follow = false;  ///< started by ssh: standard input and output lead to the first launcher
};

}  // namespace deep_ep::tools
