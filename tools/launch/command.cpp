// `deep_ep launch`: starts a command once for each rank, on one node or on many, as torchrun does, without Python. If a
// rank ends badly, all others are ended, on all nodes, and its exit status is that of every launcher.
//
// With a list of hosts a launcher on each of them is started by ssh. Otherwise a scheduler has started one on each
// node. Either way the launchers are connected, and the first one decides (coordinator.hpp); the others follow
// (follower.hpp).
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "kernels/common/limits.hpp"
#include "tools/commands.hpp"
#include "tools/launch/coordinator.hpp"
#include "tools/launch/follower.hpp"
#include "tools/launch/schedulers.hpp"

namespace deep_ep::tools {
namespace {

constexpr int kUsualPort = 29500;

/// The process that torchrun has started is a rank: nothing is left to do. Returns, as a shell would, where the command
/// cannot be started.
int become(const LaunchOptions& options) {
  if (options.ranks != 0 || !options.logs.empty()) {
    throw InvalidArgument(
        "--scheduler torchrun: each process that torchrun has started is one rank, with an output of its own; leave "
        "out "
        "--ranks and --logs");
  }
  std::vector<char*> words;
  for (const std::string& word : options.command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  ::execvp(words[0], words.data());
  const int error = errno;
  fmt::print(stderr, "deep_ep: cannot start '{}': {}\n", options.command[0], errno_text(error));
  return error == ENOENT ? 127 : 126;
}

/// What is closed stays so in effect, but its number must not become that of anything else.
void occupy_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

int run_launch(LaunchOptions options) {
  occupy_standard_descriptors();
  if (options.command.empty()) throw InvalidArgument("launch: the command is missing (-- COMMAND ...)");
  if (!options.hostfile.empty()) {
    if (options.logs.empty()) options.logs = "deep_ep_logs";
    if (options.port == 0) options.port = kUsualPort;
    return launch_on_hosts(options);
  }
  if (!options.range.empty() || !options.order_by.empty()) {
    throw InvalidArgument("launch: --range and --order-by are about the hosts of a --hostfile, which is missing");
  }
  Place place{.scheduler = {}, .master = "127.0.0.1", .seen = {}};
  if (!options.scheduler.empty() && !options.follow) place = find_place(options.scheduler);
  if (place.is_rank) return become(options);
  if (!options.master.empty()) place.master = options.master;
  if (options.port != 0 || place.port == 0) place.port = options.port != 0 ? options.port : kUsualPort;
  if (options.ranks == 0) options.ranks = std::max(1, cuda_device_count());
  if (options.follow) return follow_by_ssh(options);
  if (place.node != 0) return follow_by_tcp(options, place);
  if (!options.scheduler.empty()) return launch_as_first(options, place);
  options.master = place.master;
  options.port = place.port;
  return launch_here(options);
}

}  // namespace

void add_launch_command(CLI::App& app, Action& action, const std::vector<std::string>& command_words) {
  CLI::App* command = app.add_subcommand(
      "launch", "Start a command once for each rank: here, on hosts of a list, or under a scheduler");
  auto options = std::make_shared<LaunchOptions>();
  options->command = command_words;
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->capture_default_str();
  };
  command
      ->add_option("--ranks", options->ranks,
                   "Ranks of this node, or of each host whose line does not say (default: one for each GPU there)")
      ->check(CLI::Range(1, kMaxRanks));
  command->add_option("--logs", options->logs,
                      "Folder for a file of each rank's output, rank-N.log (with --hostfile: deep_ep_logs)");
  add("--join-timeout", options->join_timeout, "Seconds in which all nodes must have come")
      ->check(CLI::Range(0.1, 1e6));
  add("--lost-after", options->silence, "Seconds without a sign after which a node counts as lost")
      ->check(CLI::Range(1.0, 1e6));
  command->add_option("--master", options->master,
                      "Name or address by which ranks reach the first node (default: MASTER_ADDR, the scheduler's or "
                      "the list's first host)");
  command
      ->add_option(
          "--port", options->port,
          fmt::format("TCP port of the first node at which ranks meet (default: MASTER_PORT under a scheduler, "
                      "or {}). `bench` takes the next one, launchers the one behind it",
                      kUsualPort))
      ->check(CLI::Range(1, 65533));
  CLI::Option* hostfile =
      command->add_option("--hostfile", options->hostfile,
                          "Hosts to start on, a line each: HOST [slots=RANKS] [topology=BLOCK/SUBBLOCK/HOST]");
  command->add_option("--range", options->range, "With --hostfile: only these of the hosts, FROM:TO, from 1 on");
  command->add_option(
      "--order-by", options->order_by,
      "With --hostfile: file of lines HOST LABEL; hosts whose labels begin alike get neighbouring ranks");
  add("--ssh", options->ssh, "With --hostfile: what reaches a host, called with HOST and a shell command");
  std::vector<std::string> schedulers;
  for (const std::string_view one : split(kSchedulers, '|')) schedulers.emplace_back(one);
  command
      ->add_option(
          "--scheduler", options->scheduler,
          "A scheduler has started this launcher once on each node, and its variables say which node this is: " +
              std::string(kSchedulers))
      ->check(CLI::IsMember(schedulers))
      ->excludes(hostfile);
  command->add_option(
      "--topology", options->topology,
      "With --scheduler: where this node stands, BLOCK/SUBBLOCK/HOST; nodes that stand near each other get "
      "neighbouring ranks");
  command->add_flag("--follow", options->follow)->group("");
  command->footer(
      "The command stands behind --. Exit status: 0 if it is 0 for every rank, otherwise that of the first that ended "
      "badly, on all nodes; 128 + n for signal n; 1 where a node is lost or output could not be written.");
  command->callback([options, &action] { action = [options] { return run_launch(*options); }; });
}

}  // namespace deep_ep::tools
