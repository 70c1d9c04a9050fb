// The hosts of a run, and in which order their ranks are numbered.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::tools {

struct Host {
  std::string name;           ///< as ssh is told: HOST or USER@HOST
  int ranks = 0;              ///< 0: nobody says
  std::string topology = {};  ///< "block/subblock/host"; empty: not known
};

/// A line each: HOST [slots=N] [topology=LABEL]; # begins a comment. `range`, "FROM:TO", leaves out all but those
/// hosts; the first is number 1, and both ends may be missing. InvalidArgument says what is wrong.
std::vector<Host> read_hosts(const std::string& file, const std::string& range);

/// Gives the hosts the labels of `file`, lines of HOST LABEL; it must name them all.
void read_topology(const std::string& file, std::vector<Host>& hosts);

/// In which order to number nodes so that those whose labels begin alike are neighbours, and the first stays first:
/// there the ranks meet. Without any label: as they are. Labels are compared part by part; a part that the first node
/// shares comes first. InvalidArgument where some have labels, but not all; `names` are for its text.
std::vector<int> near_order(std::span<const std::string> labels, std::span<const std::string> names);

}  // namespace deep_ep::tools
