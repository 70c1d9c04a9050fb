// `deep_ep launch`: starts this host's ranks of a program without Python. torchrun, mpirun, srun and Kubernetes do all
// that concerns several hosts.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "kernels/common/limits.hpp"
#include "tools/commands.hpp"
#include "tools/common/command_line.hpp"
#include "tools/launch/launch.hpp"

namespace deep_ep::tools {
namespace {

struct LaunchOptions {
  std::vector<std::string> command;
  int ranks = 0;
  std::string scheduler = "auto";
};

int run_launch(const LaunchOptions& options) {
  if (options.command.empty()) throw InvalidArgument("launch: the command is missing (-- COMMAND ...)");
  const int ranks = options.ranks != 0 ? options.ranks : std::max(1, cuda_device_count());
  return run_rank_processes(options.command, find_place(options.scheduler), ranks, true);
}

}  // namespace

void add_launch_command(CLI::App& app, Action& action, const std::vector<std::string>& command_words) {
  CLI::App* command = app.add_subcommand("launch", "Start a command once for each rank of this host");
  auto options = std::make_shared<LaunchOptions>();
  options->command = command_words;
  add_number(*command, "--ranks", options->ranks, 1, kMaxRanks,
             "Ranks of this host, the same number on all (default: one for each GPU)");
  command
      ->add_option("--scheduler", options->scheduler,
                   "Whose variables say which node this is; auto: those that are set, or this host alone")
      ->check([](const std::string& word) {
        return std::string(word == "torchrun" ? "what torchrun starts is a rank, and needs no launch" : "");
      })
      ->check(CLI::IsMember({"auto", "none", "indexed-job", "jobset", "slurm", "mpi", "nodes"}))
      ->capture_default_str();
  add_gone_options(
      *command,
      {
          {"--hostfile,--range,--ssh", "let mpirun --map-by ppr:1:node, srun or a loop of ssh start it on each host"},
          {"--order-by,--topology", "the order of hosts is that of mpirun's host file, of Slurm or of Kueue"},
          {"--logs", "each line names its rank; for files start: sh -c 'exec COMMAND > rank-$RANK.log 2>&1'"},
          {"--join-timeout,--lost-after",
           "ranks wait for each other themselves; mpirun, srun and Kubernetes end the nodes"},
          {"--master,--port", "set MASTER_ADDR and MASTER_PORT"},
      });
  command->footer(
      "The command stands behind --. Exit status: 0 if it is 0 for every rank, otherwise that of the first that ended "
      "badly; 128 + n for signal n; 1 where output could not be written.");
  command->callback([options, &action] { action = [options] { return run_launch(*options); }; });
}

}  // namespace deep_ep::tools
