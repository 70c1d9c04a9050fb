#include "tools/bench/world.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "csrc/support/token.hpp"
#include "deep_ep/executor.hpp"
#include "tools/common/socket_bootstrap.hpp"

namespace deep_ep::tools {
namespace {

/// The variables by which launchers tell a process who it is.
struct Launcher {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* job;
};
constexpr Launcher kLaunchers[] = {
    // torchrun and --spawn: ranks of several hosts meet at an address.
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_NAMESPACE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_JOBID"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID"},  // of srun, not of its batch script
};

std::optional<int> number_in_environment(const char* name) {
  const char* text = std::getenv(name);
  const auto number = parse_number<int>(text == nullptr ? "" : text);
  return number && *number >= 0 ? number : std::nullopt;
}

const Launcher* find_launcher() {
  for (const Launcher& launcher : kLaunchers) {
    const auto size = number_in_environment(launcher.size);
    // RANK without LOCAL_RANK is a node's: see node_of_environment.
    const bool is_complete =
        &launcher != kLaunchers || (number_in_environment(launcher.local_rank) && std::getenv(launcher.job) != nullptr);
    if (!size || !number_in_environment(launcher.rank) || !is_complete) continue;
    if (*size > 1) return &launcher;
    if (&launcher == kLaunchers) return nullptr;  // one rank, whatever started its launcher
  }
  return nullptr;
}

struct NodeOfSeveral {
  int node;
  int nodes;
};

/// Variables as DeepEP's tests read them: RANK and WORLD_SIZE number nodes, and nothing numbers processes.
std::optional<NodeOfSeveral> node_of_environment() {
  const char* const text = std::getenv("WORLD_SIZE");
  if (text == nullptr || std::getenv("LOCAL_RANK") != nullptr) return std::nullopt;
  const auto nodes = number_in_environment("WORLD_SIZE");
  if (!nodes || *nodes == 0) {
    fail<InvalidArgument>("WORLD_SIZE={} without LOCAL_RANK counts nodes, and is no such number: 1 or more", text);
  }
  if (*nodes == 1) return std::nullopt;
  const auto node = number_in_environment("RANK");
  if (!node || *node >= *nodes) {
    fail<InvalidArgument>(
        "WORLD_SIZE={} without LOCAL_RANK counts nodes, so RANK must be this node's number, 0 to {}; it is {}", *nodes,
        *nodes - 1, node ? fmt::format("{}", *node) : "not such a number");
  }
  if (std::getenv("MASTER_ADDR") == nullptr) {
    fail<InvalidArgument>(
        "WORLD_SIZE={} and RANK={} are set, but MASTER_ADDR is not: set it to the address of node 0, or "
        "unset the others to run on this host alone",
        *nodes, *node);
  }
  return NodeOfSeveral{*node, *nodes};
}

constexpr double kSlowStart = 300;  // seconds, on file systems that all hosts share

int master_port() { return number_in_environment("MASTER_PORT").value_or(29500); }

/// At the port behind MASTER_PORT, where torchrun itself listens. Its `--rdzv-id` tells jobs apart.
std::shared_ptr<Bootstrap> meet_by_address(const char* address, const char* job, int rank, int size) {
  return make_socket_bootstrap(rank, size, address, static_cast<std::uint16_t>(master_port() + 1), kSlowStart,
                               job_token(job != nullptr ? job : ""));
}
std::shared_ptr<Bootstrap> meet_by_environment(int rank, int size) {
  return meet_by_address(std::getenv("MASTER_ADDR"), std::getenv("TORCHELASTIC_RUN_ID"), rank, size);
}

/// The ranks of this node as threads.
World world_of_node(const NodeOfSeveral& place, int ranks_per_node) {
  World world;
  world.kind = fmt::format("threads of {} processes, TCP", place.nodes);
  world.nodes = place.nodes;
  const int size = place.nodes * ranks_per_node, first_rank = place.node * ranks_per_node;
  if (ranks_per_node == 1) world.first_device = first_rank % std::max(1, cuda_device_count());
  world.bootstraps.resize(static_cast<std::size_t>(ranks_per_node));
  run_ranks(ranks_per_node, [&](int local) {
    world.bootstraps[static_cast<std::size_t>(local)] = meet_by_environment(first_rank + local, size);
  });
  return world;
}

}  // namespace

bool World::several_processes() { return find_launcher() != nullptr || node_of_environment(); }

World make_world(int ranks, int ranks_per_node, const std::string& device) {
  const int usual = device != "cpu" && cuda_device_count() > 0 ? cuda_device_count() : 4;
  World world;
  if (const Launcher* launcher = find_launcher()) {
    const int rank = *number_in_environment(launcher->rank);
    const int size = *number_in_environment(launcher->size);
    if (launcher == &kLaunchers[0]) {
      world.kind = "processes, TCP";
      world.bootstraps.push_back(meet_by_environment(rank, size));
    } else {
#if DEEP_EP_HAVE_MPI
      world.kind = "processes, MPI";
      world.bootstraps.push_back(make_mpi_bootstrap());
#else
      // This build has no MPI to say where the others are.
      const char* const address = std::getenv("MASTER_ADDR");
      world.kind = address == nullptr ? "processes of one host, TCP" : "processes, TCP";
      world.bootstraps.push_back(
          meet_by_address(address == nullptr ? "127.0.0.1" : address, std::getenv(launcher->job), rank, size));
#endif
    }
    // A launcher may show each process only its own GPU.
    const int on_host = number_in_environment(launcher->local_rank).value_or(rank);
    world.first_device = on_host % std::max(1, cuda_device_count());
    const int met = world.bootstraps.front()->size();  // processes of another MPI than this program's meet none
    if (ranks != 0 && ranks != met) {
      fail<InvalidArgument>("--ranks {}: {} processes were started, and each is one rank", ranks, met);
    }
    return world;
  }
  if (const auto place = node_of_environment()) {
    if (ranks_per_node == 0 && ranks % place->nodes != 0) {
      fail<InvalidArgument>("--ranks {}: {} nodes cannot share them evenly", ranks, place->nodes);
    }
    if (ranks_per_node == 0) ranks_per_node = ranks != 0 ? ranks / place->nodes : usual;
    return world_of_node(*place, ranks_per_node);
  }
  if (ranks == 0) ranks = usual;
  world.kind = "threads";
  world.bootstraps = make_thread_bootstraps(ranks);
  return world;
}

Place place_of_this_host(int ranks) {
  if (const auto node = node_of_environment()) {
    return {.node = node->node, .nodes = node->nodes, .master = std::getenv("MASTER_ADDR"), .port = master_port()};
  }
  if (find_launcher() != nullptr) {
    fail<InvalidArgument>("--spawn {}: this process is one of several already; leave it out", ranks);
  }
  const bool agreed = environment::of_process("DEEP_EP_JOB_TOKEN").has_value();
  return {.port = free_master_port(), .job = agreed ? "" : to_string(random_token())};
}

void run_workloads(const World& world, Device::Kind device, const std::vector<WorkloadShape>& shapes,
                   const RankWork& work, bool with_selections) {
  std::vector<Routes> routes;
  for (const WorkloadShape& shape : shapes) routes.emplace_back(shape, with_selections);
  run_ranks(world.local_ranks(), [&](int local) {
    const auto& bootstrap = world.bootstraps[static_cast<std::size_t>(local)];
    const auto executor = make_executor(device, device == Device::Kind::cuda ? world.device_of(local) : 0);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      if (bootstrap->rank() == 0)
        show_progress(fmt::format("[{}/{}] {} tokens per rank", i + 1, shapes.size(), shapes[i].tokens));
      work({shapes[i], routes[i], bootstrap, executor});
    }
  });
  clear_progress();
}

}  // namespace deep_ep::tools
