// The ranks of a benchmark: all ranks as threads of this process, or one rank of several processes.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/tensor.hpp"
#include "tools/bench/workload.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {

struct World {
  std::vector<std::shared_ptr<Bootstrap>> bootstraps;  ///< one for every rank of this process
  std::string kind;                                    ///< "threads", "processes (MPI)", ...
  int nodes = 0;                                       ///< where each process is a node, how many; else 0
  int first_device = 0;                                ///< GPU of the first rank of this process

  int size() const { return bootstraps.front()->size(); }
  int first_rank() const { return bootstraps.front()->rank(); }  ///< of this process
  int local_ranks() const { return static_cast<int>(bootstraps.size()); }
  /// Whether make_world will make this process one of several.
  static bool several_processes();
  /// The GPU of a rank of this process.
  int device_of(int local_rank) const { return first_device + local_rank; }
};

/// Started with several processes by mpirun, srun, torchrun or --spawn this process is one rank. Started once
/// on each node with RANK, WORLD_SIZE (of nodes) and MASTER_ADDR, as DeepEP's tests are, its threads are the ranks of
/// the node: `ranks_per_node`. Otherwise `ranks` threads. 0 chooses as many as there are GPUs, or 4 on the CPU.
/// @throws InvalidArgument for variables that may mean either, or neither.
World make_world(int ranks, int ranks_per_node, const std::string& device);

/// The host that --spawn fills with `ranks` processes: by RANK and WORLD_SIZE (of nodes) and MASTER_ADDR, or alone.
/// @throws InvalidArgument where this process is one of several already.
Place place_of_this_host(int ranks);

/// One rank of this process, and what it works on.
struct RankTask {
  const WorkloadShape& shape;
  const Routes& routes;
  std::shared_ptr<Bootstrap> bootstrap;
  std::shared_ptr<Executor> executor;

  int rank() const { return bootstrap->rank(); }
};
using RankWork = std::function<void(const RankTask& task)>;

/// Does the work for each shape in turn, on all ranks of this process at once, and shows progress.
void run_workloads(const World& world, Device::Kind device, const std::vector<WorkloadShape>& shapes,
                   const RankWork& work, bool with_selections = false);

}  // namespace deep_ep::tools
