// The processes behind run_cluster: this test program started again, once per rank.
#pragma once

#include <sys/types.h>

#include <set>
#include <string>
#include <vector>

namespace deep_ep::test {

/// What a process started by run_processes is.
struct RankProcess {
  int rank = 0;
  int parent = 0;             ///< the process that called run_processes
  std::string meeting_point;  ///< see meet_at
};

/// How a rank's process ends when all went well. Not 0, with which a process ends that never got to its run_cluster.
inline constexpr int kRankSucceeded = 86;

/// True in a process started by run_processes.
bool is_rank_process();
RankProcess rank_process();

/// True if this process was started for the call of run_cluster that asks. Counts the calls.
bool is_own_cluster();

/// Starts the ranks, waits for them, and returns what each wrote to stderr if it failed (empty if it did not).
/// Ranks that still run after cluster_patience() are killed and reported.
std::vector<std::string> run_processes(int ranks, const std::set<int>& lost_ranks);

/// This program, started again.
struct Child {
  pid_t pid = 0;
  int output = -1;  ///< memory file of what it writes
  bool ended = false;
  int status = 0;

  std::string written() const;
  /// Ends it if it has not ended, and says so.
  bool end();
};
/// With these arguments and variables (none: this program's). `output`: the descriptor that it writes to.
Child start_again(std::vector<std::string> arguments, std::vector<std::string> variables, int output);

}  // namespace deep_ep::test
