// Which node of a run this is, where a scheduler has started one launcher on each of its nodes.
#pragma once

#include <string>
#include <string_view>

#include "csrc/support/environment.hpp"

namespace deep_ep::tools {

struct Place {
  std::string scheduler;  ///< one of the words of kSchedulers, less "auto"
  int node = 0;
  int nodes = 1;
  std::string master = {};  ///< by which the nodes reach the first one
  int port = 0;             ///< 0: nothing says one
  std::string seen = {};    ///< "SLURM_NODEID=1, SLURM_NNODES=2": what says so
  bool is_rank = false;     ///< torchrun has started this process as a rank; the numbers above mean nothing
};

/// The words of --scheduler, separated by '|'.
inline constexpr std::string_view kSchedulers = "auto|indexed-job|jobset|slurm|mpi|nodes|torchrun";

/// From the variables of that scheduler, or, with "auto", of the one whose variables are there. InvalidArgument where
/// one is missing or wrong, or where those of several schedulers say different things.
Place find_place(const std::string& scheduler, const environment::Source& variables = environment::of_process);

}  // namespace deep_ep::tools
