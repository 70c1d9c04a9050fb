#include <algorithm>
#include <optional>
#include <string_view>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/launch/launch.hpp"

namespace deep_ep::tools {
namespace {

/// Names of variables are separated by '|'; the first that is set counts.
struct Scheduler {
  std::string_view name, node, nodes;
  std::string_view processes;  ///< how many it has started: here, or of the job, where they are as many as nodes
  std::string_view remedy;     ///< for more than one of a node
  std::string_view job;
};
constexpr Scheduler kSchedulers[] = {  // the one that knows most first
    {"indexed-job", "JOB_COMPLETION_INDEX", "DEEP_EP_NODES", "", "", ""},
    {"jobset", "JOB_COMPLETION_INDEX", "DEEP_EP_NODES", "", "", ""},
    {"slurm", "SLURM_NODEID", "SLURM_STEP_NUM_NODES|SLURM_NNODES", "SLURM_STEP_NUM_TASKS", "srun --ntasks-per-node=1",
     "SLURM_JOB_ID"},
    {"mpi", "OMPI_COMM_WORLD_RANK|PMI_RANK", "OMPI_COMM_WORLD_SIZE|PMI_SIZE",
     "OMPI_COMM_WORLD_LOCAL_SIZE|MPI_LOCALNRANKS", "mpirun --map-by ppr:1:node", "PMIX_NAMESPACE|PMI_JOBID"},
    {"nodes", "RANK", "WORLD_SIZE", "", "", ""}};

bool is_set(std::string_view name) { return environment::of_process(name).has_value(); }

class Reading {
 public:
  explicit Reading(const Scheduler& scheduler) : from_(scheduler) {
    place.nodes = number(scheduler.nodes, 1, 65536);
    seen = fmt::format("{}={}", name_, place.nodes);
    place.node = number(scheduler.node, 0, place.nodes - 1);
    seen = fmt::format("{} ({}={}, {})", scheduler.name, name_, place.node, seen);
  }

  void read_the_rest() {
    const bool slurm = from_.name == "slurm";
    if (place.nodes > 1 && slurm && !is_set("SLURM_STEP_NUM_NODES")) {  // a batch script
      fail<InvalidArgument>(
          "--scheduler slurm: {} nodes, no SLURM_STEP_NUM_NODES: start it by srun --ntasks-per-node=1", place.nodes);
    }
    if (from_.name == "nodes" && text("LOCAL_RANK|LOCAL_WORLD_SIZE|TORCHELASTIC_RUN_ID")) {
      fail<InvalidArgument>("--scheduler nodes: {} is set: a rank of torchrun needs no launch; else unset it", name_);
    }
    const auto started = text(from_.processes);
    if (started && *started != std::to_string(slurm ? place.nodes : 1)) {
      fail<InvalidArgument>("--scheduler {}: {}={}, but launch starts the ranks of a node itself: {}", from_.name,
                            name_, *started, from_.remedy);
    }
    place.job = text(from_.job).value_or("");
    if (slurm) place.job += '.' + text("SLURM_STEP_ID").value_or("");
    if (is_set("MASTER_PORT")) place.port = number("MASTER_PORT", 1, 65534);  // `bench` takes the next one
    if (place.nodes > 1) place.master = text("MASTER_ADDR").value_or(slurm ? first_of_slurm() : "");
    if (place.master.empty()) {
      fail<InvalidArgument>(
          "--scheduler {}: MASTER_ADDR is not set: it names the first node (mpirun -x MASTER_ADDR=NAME)", from_.name);
    }
  }

  Place place;
  std::string seen;  ///< "slurm (SLURM_NODEID=1, SLURM_NNODES=2)"

 private:
  std::optional<std::string> text(std::string_view names) {
    for (const std::string_view name : split(names, '|')) {
      name_ = name;
      if (auto value = environment::of_process(name)) return value;
    }
    return std::nullopt;
  }

  int number(std::string_view names, int least, int most) {
    const auto value = text(names);
    if (!value)
      fail<InvalidArgument>("--scheduler {}: {} is not set: the scheduler sets it (DEEP_EP_NODES: the manifest)",
                            from_.name, names);
    const auto number = parse_number<int>(*value);
    if (!number || *number < least || *number > most)
      fail<InvalidArgument>("--scheduler {}: {}='{}', allowed: {} to {}", from_.name, name_, *value, least, most);
    return *number;
  }

  /// Of "gpu[07-08,11]-ib,login": gpu07-ib.
  std::string first_of_slurm() {
    const std::string all = text("SLURM_STEP_NODELIST|SLURM_JOB_NODELIST").value_or("");
    std::string first, list = all;
    while (!list.empty() && list[0] != ',') {
      const std::size_t end = list[0] == '[' ? list.find(']') : 0;
      if (end == std::string::npos)
        fail<InvalidArgument>("--scheduler {}: {}='{}', allowed: names of nodes such as gpu[1-4,07],login", from_.name,
                              name_, all);
      first += end == 0 ? list.substr(0, 1) : list.substr(1, list.find_first_of(",-]") - 1);
      list.erase(0, end + 1);
    }
    return first;
  }

  const Scheduler& from_;
  std::string name_;  ///< of the variable that was read last
};

/// Whether "auto" takes it. In a process of torchrun the variables of all others are of no use.
bool is_there(const Scheduler& scheduler) {
  if (is_set("RANK") && is_set("LOCAL_RANK")) return scheduler.name == "nodes";
  if (scheduler.name == "nodes") return is_set("RANK") && is_set("WORLD_SIZE");
  // A pod of a Job that is not Indexed has only what its manifest says, and must not run alone.
  if (scheduler.name == "indexed-job" && is_set("DEEP_EP_NODES")) return true;
  return scheduler.name != "jobset" && std::ranges::any_of(split(scheduler.node, '|'), is_set);
}

}  // namespace

Place find_place(const std::string& scheduler) {
  std::optional<Reading> found;
  for (const Scheduler& one : kSchedulers) {
    if (scheduler == "auto" ? !is_there(one) : scheduler != one.name) continue;
    const Reading other(one);
    if (!found) found.emplace(one).read_the_rest();
    // The first is believed. Of the others, which may well know less, only what would contradict it is asked.
    if (other.place.node != found->place.node || other.place.nodes != found->place.nodes) {
      fail<InvalidArgument>("--scheduler auto: {} and {} contradict; name the one that counts", found->seen,
                            other.seen);
    }
  }
  return found ? found->place : Place{};
}

}  // namespace deep_ep::tools
