// The ranks of this host as processes that end together.
#pragma once

#include <string>
#include <vector>

#include "tools/common/ranks.hpp"

namespace deep_ep::tools {

/// From the variables of a scheduler that has started one launcher on each of its nodes; "none": this host alone;
/// "auto": as the variables say that are there. InvalidArgument where one is missing or wrong, or where schedulers
/// contradict.
Place find_place(const std::string& scheduler);

/// Runs the command once for each of this host's ranks. SIGINT, SIGTERM and SIGHUP end all ranks, SIGUSR1 and SIGUSR2
/// reach them. Once one has ended badly, the others get SIGTERM, and SIGKILL 5 s later; a line on standard error names
/// it. `labelled`: each line of output begins with "[RANK] ". Returns the status of that rank, 128 + n for signal n; 1
/// where output cannot be written. At most once in a process.
int run_rank_processes(const std::vector<std::string>& words, Place place, int ranks, bool labelled);

}  // namespace deep_ep::tools
