#include "tools/launch/schedulers.hpp"

#include <fmt/format.h>

#include <optional>
#include <utility>
#include <vector>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/launch/nodelist.hpp"

namespace deep_ep::tools {
namespace {

constexpr int kMostNodes = 65536;
constexpr int kMostPorts = 65533;  // the ranks take the next one, the launchers the one behind it

/// The variables that one scheduler is asked for, and those of them that are there.
class Variables {
 public:
  Variables(std::string_view scheduler, const environment::Source& source) : scheduler_(scheduler), source_(source) {}

  /// The first of the names that is set; nothing if none is.
  std::optional<std::string> text(std::initializer_list<std::string_view> names) {
    for (const std::string_view name : names) {
      if (auto value = source_(name)) {
        name_ = name;
        seen_ += fmt::format("{}{}={}", seen_.empty() ? "" : ", ", name, *value);
        return value;
      }
    }
    return std::nullopt;
  }

  std::string needed_text(std::initializer_list<std::string_view> names, std::string_view why) {
    if (auto value = text(names)) return *value;
    fail<InvalidArgument>("--scheduler {}: {} is not set: {}", scheduler_, fmt::join(names, " or "), why);
  }

  int needed_number(std::initializer_list<std::string_view> names, int least, int most, std::string_view why) {
    return number_of(needed_text(names, why), least, most);
  }

  std::optional<int> number(std::initializer_list<std::string_view> names, int least, int most) {
    const auto value = text(names);
    return value ? std::optional(number_of(*value, least, most)) : std::nullopt;
  }

  const std::string& seen() const { return seen_; }
  std::string_view last_name() const { return name_; }

 private:
  int number_of(const std::string& value, int least, int most) const {
    const auto number = parse_number<int>(value);
    if (number && *number >= least && *number <= most) return *number;
    fail<InvalidArgument>("--scheduler {}: {}='{}', allowed: {} to {}", scheduler_, name_, value, least, most);
  }

  std::string_view scheduler_;
  const environment::Source& source_;
  std::string_view name_;
  std::string seen_;
};

/// How much of what a scheduler says is asked for.
enum class Extent { all, counts };

/// Node and number of nodes; why each is needed.
void read_counts(Place& place, Variables& variables, std::initializer_list<std::string_view> node,
                 std::initializer_list<std::string_view> nodes, std::string_view why) {
  place.nodes = variables.needed_number(nodes, 1, kMostNodes, why);
  place.node = variables.needed_number(node, 0, place.nodes - 1, why);
}

/// One launcher starts all ranks of its node.
void require_one_launcher(const Place& place, std::optional<int> launchers, int nodes, std::string_view variable,
                          std::string_view remedy) {
  if (!launchers || *launchers == nodes) return;
  fail<InvalidArgument>("--scheduler {}: {}={}, but launch starts the ranks of a node itself: {}", place.scheduler,
                        variable, *launchers, remedy);
}

void read_meeting(Place& place, Variables& variables, std::string_view how) {
  place.port = variables.number({"MASTER_PORT"}, 1, kMostPorts).value_or(0);
  if (const auto master = variables.text({"MASTER_ADDR"})) {
    place.master = *master;
  } else if (place.master.empty() && place.nodes > 1) {
    fail<InvalidArgument>("--scheduler {}: MASTER_ADDR is not set: it names the first node, {}", place.scheduler, how);
  } else if (place.master.empty()) {
    place.master = "127.0.0.1";
  }
}

void read_indexed_job(Place& place, Variables& variables, Extent extent) {
  read_counts(place, variables, {"JOB_COMPLETION_INDEX"}, {"DEEP_EP_NODES"},
              "Kubernetes sets JOB_COMPLETION_INDEX in pods of an Indexed Job, and the manifest the number of pods as "
              "DEEP_EP_NODES");
  if (extent == Extent::counts) return;
  read_meeting(place, variables, "the stable name of pod 0: JOB-0.SERVICE");
}

/// A batch script has Slurm's variables, too, but is one process: nobody would start the launchers of the other nodes.
void require_step(const Place& place, Variables& variables) {
  if (place.nodes == 1 || variables.text({"SLURM_STEP_NUM_NODES"})) return;
  fail<InvalidArgument>(
      "--scheduler {}: {} nodes, but SLURM_STEP_NUM_NODES is not set: start it on each of them by srun "
      "--ntasks-per-node=1, also in a batch script (or name --scheduler mpi, if mpirun has started it)",
      place.scheduler, place.nodes);
}

void read_slurm(Place& place, Variables& variables, Extent extent) {
  read_counts(place, variables, {"SLURM_NODEID"}, {"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"},
              "srun sets it for what it starts");
  if (extent == Extent::counts) return;
  require_step(place, variables);
  const auto tasks = variables.number({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}, 1, kMostNodes);
  require_one_launcher(place, tasks, place.nodes, variables.last_name(), "srun --ntasks-per-node=1");
  if (const auto list = variables.text({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"})) {
    place.master = expand_nodelist(variables.last_name(), *list).front();
  }
  read_meeting(place, variables, "if there is no SLURM_JOB_NODELIST");
}

void read_mpi(Place& place, Variables& variables, Extent extent) {
  read_counts(place, variables, {"OMPI_COMM_WORLD_RANK", "PMI_RANK"}, {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"},
              "mpirun sets it for what it starts");
  if (extent == Extent::counts) return;
  const auto local = variables.number({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}, 1, kMostNodes);
  require_one_launcher(place, local, 1, variables.last_name(), "mpirun --map-by ppr:1:node");
  read_meeting(place, variables, "as MPI does not: mpirun -x MASTER_ADDR=NAME");
}

/// As the test scripts of DeepEP are started by hand.
void read_nodes(Place& place, Variables& variables, Extent extent) {
  read_counts(place, variables, {"RANK"}, {"WORLD_SIZE"}, "it counts nodes here");
  if (extent == Extent::counts) return;
  if (const auto local = variables.text({"LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"})) {
    fail<InvalidArgument>(
        "--scheduler {}: {}: RANK and WORLD_SIZE may count ranks, because of {}, or nodes: unset {} or use "
        "--scheduler torchrun",
        place.scheduler, variables.seen(), variables.last_name(), variables.last_name());
  }
  read_meeting(place, variables, "or says its address");
}

void read_torchrun(Place& place, Variables& variables) {
  constexpr std::string_view kWhy = "torchrun sets it for what it starts";
  const int size = variables.needed_number({"WORLD_SIZE"}, 1, kMostNodes, kWhy);
  variables.needed_number({"RANK"}, 0, size - 1, kWhy);
  variables.needed_number({"LOCAL_RANK"}, 0, size - 1, kWhy);
  place.is_rank = true;
}

Place read(const std::string& scheduler, const environment::Source& source, Extent extent = Extent::all) {
  Place place{.scheduler = scheduler};
  Variables variables(scheduler, source);
  if (scheduler == "slurm") {
    read_slurm(place, variables, extent);
  } else if (scheduler == "mpi") {
    read_mpi(place, variables, extent);
  } else if (scheduler == "nodes") {
    read_nodes(place, variables, extent);
  } else if (scheduler == "torchrun") {
    read_torchrun(place, variables);
  } else {
    read_indexed_job(place, variables, extent);
  }
  place.seen = variables.seen();
  return place;
}

/// Whose variables are there, the one that knows most first.
std::vector<std::string> recognised(const environment::Source& source) {
  const auto is_set = [&](std::string_view name) { return source(name).has_value(); };
  std::vector<std::string> found;
  if (is_set("JOB_COMPLETION_INDEX")) found.emplace_back("indexed-job");
  if (is_set("SLURM_NODEID")) found.emplace_back("slurm");
  if (is_set("OMPI_COMM_WORLD_RANK") || is_set("PMI_RANK")) found.emplace_back("mpi");
  if (is_set("RANK") && is_set("WORLD_SIZE")) found.emplace_back(is_set("LOCAL_RANK") ? "torchrun" : "nodes");
  return found;
}

}  // namespace

Place find_place(const std::string& scheduler, const environment::Source& variables) {
  if (scheduler != "auto") return read(scheduler, variables);
  const std::vector<std::string> found = recognised(variables);
  if (found.empty()) {
    throw InvalidArgument(
        "--scheduler auto: no scheduler's variables are set (JOB_COMPLETION_INDEX, SLURM_NODEID, OMPI_COMM_WORLD_RANK, "
        "PMI_RANK, or RANK and WORLD_SIZE)");
  }
  // torchrun may have been started by any of the others, but says when it has started something.
  if (found.back() == "torchrun" && variables("TORCHELASTIC_RUN_ID")) return read("torchrun", variables);
  std::optional<Place> first;
  for (const std::string& one : found) {
    // The first is believed. Of the others, which may well know less, only what would contradict it is asked.
    Place place = read(one, variables, first ? Extent::counts : Extent::all);
    if (!first) {
      first = std::move(place);
    } else if (place.node != first->node || place.nodes != first->nodes || place.is_rank != first->is_rank) {
      fail<InvalidArgument>("--scheduler auto: {} ({}) and {} ({}) say different things; name the one that counts",
                            first->scheduler, first->seen, place.scheduler, place.seen);
    }
  }
  return *first;
}

}  // namespace deep_ep::tools
