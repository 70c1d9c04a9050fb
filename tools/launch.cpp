// `deep_ep launch`: starts a command once for each rank, here or, by ssh, on several hosts, as torchrun does, without
// Python. If one ends badly, the others are ended, and its exit status is the launcher's.
//
// On each host of a list a launcher of its own starts the ranks there. It ends them when its standard input ends, which
// the first launcher holds open: so they end with that one, however it ends.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"
#include "tools/commands.hpp"
#include "tools/common/crew.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

struct LaunchOptions {
  std::string hostfile;
  int ranks = 0;
  std::string logs = "deep_ep_logs";
  std::string ssh = "ssh -o BatchMode=yes";
  int port = 29500;
  std::vector<std::string> command;
  // What the first launcher tells those of the hosts.
  int first_rank = 0;
  int world_size = 0;  ///< 0: this is the first launcher
  std::string master = "127.0.0.1";
};

struct Host {
  std::string name;
  int ranks = 0;
};

std::vector<Host> read_hosts(const std::string& file, int ranks) {
  std::ifstream in(file);
  if (!in) throw InvalidArgument(fmt::format("--hostfile {}: cannot read it", file));
  std::vector<Host> hosts;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    Host host{.ranks = ranks};
    if (!(words >> host.name)) continue;
    if (host.name.starts_with('-')) {
      throw InvalidArgument(fmt::format("--hostfile {}: '{}', allowed: HOST, HOST slots=N", file, line));
    }
    for (std::string word; words >> word;) {
      const std::string_view digits = std::string_view(word).substr(word.find('=') + 1);
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), host.ranks);
      if (!word.starts_with("slots=") || error != std::errc() || end != digits.data() + digits.size() ||
          host.ranks < 1) {
        throw InvalidArgument(fmt::format("--hostfile {}: '{}', allowed: HOST, HOST slots=N", file, line));
      }
    }
    hosts.push_back(std::move(host));
  }
  if (hosts.empty()) throw InvalidArgument(fmt::format("--hostfile {}: there is no host in it", file));
  return hosts;
}

/// What the other hosts call the first one.
std::string address_of(const std::vector<Host>& hosts) {
  const std::string& name = hosts.front().name;
  std::string address = name.substr(name.find('@') + 1);  // all of it where there is no user
  if (hosts.size() > 1 && (address == "localhost" || address == "::1" || address.starts_with("127."))) {
    throw InvalidArgument(fmt::format(
        "--hostfile: the first of several hosts is {}, allowed: a name or an address by which the others reach it",
        name));
  }
  return address;
}

void pause_briefly() { ::poll(nullptr, 0, 20); }

int launch_here(const LaunchOptions& options, int ranks) {
  const int world_size = options.world_size == 0 ? ranks : options.world_size;
  Crew crew;
  for (int rank = 0; rank < ranks; ++rank) {
    crew.start(fmt::format("rank {}", options.first_rank + rank), options.command,
               {fmt::format("RANK={}", options.first_rank + rank), fmt::format("WORLD_SIZE={}", world_size),
                fmt::format("LOCAL_RANK={}", rank), fmt::format("LOCAL_WORLD_SIZE={}", ranks),
                fmt::format("MASTER_ADDR={}", options.master), fmt::format("MASTER_PORT={}", options.port)},
               -1, -1);
  }
  return crew.run(
      options.world_size != 0, [&] { crew.signal_all(SIGTERM); }, pause_briefly);
}

/// A word of a shell's command.
std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

/// Variables that the ranks of other hosts need as those here do.
std::string variables_to_send() {
  constexpr std::array kWanted = {
      "DEEP_EP_", "NVSHMEM_", "NCCL_", "CUDA_", "PATH=", "PYTHON", "LD_LIBRARY_PATH=", "VIRTUAL_ENV="};
  std::string text;
  for (const std::string& name : environment::names_of_process()) {
    const std::string variable = name + "=" + environment::of_process(name.c_str()).value_or("");
    const auto begins_it = [&](const char* prefix) { return variable.starts_with(prefix); };
    if (std::any_of(kWanted.begin(), kWanted.end(), begins_it)) text += " " + quoted(variable);
  }
  return text;
}

/// What the launcher of a host is told. Its shell is whatever the user has there.
std::string command_for(const LaunchOptions& options, const Host& host, int first_rank, int world_size) {
  std::string text =
      fmt::format("cd {} && exec env{} {} launch --ranks {} --first-rank {} --world-size {} --master {} --port {} --",
                  quoted(std::filesystem::current_path()), variables_to_send(),
                  quoted(std::filesystem::read_symlink("/proc/self/exe")), host.ranks, first_rank, world_size,
                  quoted(options.master), options.port);
  for (const std::string& word : options.command) text += " " + quoted(word);
  return text;
}

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail<SystemError>("cannot start ranks: {}", errno_text(errno));
    out = UniqueFd(ends[0]);
    in = UniqueFd(ends[1]);
  }
  UniqueFd out, in;
};

/// What the first host says is for the terminal, too.
void show(UniqueFd& from, int log) {
  std::array<char, 4096> bytes;
  pollfd ready{.fd = from.get(), .events = POLLIN, .revents = 0};
  if (!from || ::poll(&ready, 1, 20) <= 0) return pause_briefly();
  const ssize_t count = ::read(from.get(), bytes.data(), bytes.size());
  if (count <= 0) {
    from = UniqueFd();
    return;
  }
  for (const int to : {STDOUT_FILENO, log}) {
    [[maybe_unused]] const ssize_t written = ::write(to, bytes.data(), static_cast<std::size_t>(count));
  }
}

int launch_on_hosts(LaunchOptions options, int ranks) {
  const std::vector<Host> hosts = read_hosts(options.hostfile, ranks);
  options.master = address_of(hosts);
  int world_size = 0;
  for (const Host& host : hosts) world_size += host.ranks;
  std::istringstream words(options.ssh);
  const std::vector<std::string> ssh{std::istream_iterator<std::string>(words), {}};
  std::error_code refused;
  std::filesystem::create_directories(options.logs, refused);

  Pipe lifeline;
  Pipe output;
  std::vector<UniqueFd> logs;
  Crew crew;
  int first_rank = 0;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const std::string log = fmt::format("{}/{}-{}.log", options.logs, i, hosts[i].name);
    logs.emplace_back(::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (!logs.back()) throw SystemError(fmt::format("--logs {}: cannot write {}", options.logs, log));
    std::vector<std::string> command = ssh;
    command.push_back(hosts[i].name);
    command.push_back(command_for(options, hosts[i], first_rank, world_size));
    crew.start(fmt::format("host {} ({})", hosts[i].name, log), command, {}, lifeline.out.get(),
               i == 0 ? output.in.get() : logs[i].get());
    first_rank += hosts[i].ranks;
  }
  output.in = UniqueFd();
  const int status = crew.run(
      false, [&] { lifeline.in = UniqueFd(); }, [&] { show(output.out, logs[0].get()); });
  while (output.out) show(output.out, logs[0].get());
  return status;
}

int run_launch(const LaunchOptions& options) {
  if (options.command.empty()) throw InvalidArgument("launch: the command is missing (-- COMMAND ...)");
  const int ranks = options.ranks != 0 ? options.ranks : std::max(1, cuda_device_count());
  return options.hostfile.empty() ? launch_here(options, ranks) : launch_on_hosts(options, ranks);
}

}  // namespace

void add_launch_command(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("launch", "Start a command once for each rank, here or by ssh on several hosts");
  auto options = std::make_shared<LaunchOptions>();
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->capture_default_str();
  };
  command
      ->add_option("--ranks", options->ranks,
                   "Ranks of this host, or of each whose line does not say (default: one for each GPU here)")
      ->check(CLI::Range(1, 128));
  command->add_option("--hostfile", options->hostfile, "Hosts to start on, a line each: HOST, or HOST slots=RANKS");
  add("--logs", options->logs, "With --hostfile: folder for a file of each host's output");
  add("--ssh", options->ssh, "With --hostfile: what reaches a host, called with HOST and a shell command");
  add("--port", options->port, "TCP port of the first host at which ranks meet (MASTER_PORT)")
      ->check(CLI::Range(1, 65534));  // `bench` takes the next one, too
  command->add_option("command", options->command, "The command, after --");
  command->add_option("--first-rank", options->first_rank)->group("");
  command->add_option("--world-size", options->world_size)->group("");
  command->add_option("--master", options->master)->group("");
  command->footer(
      "Exit status: 0 if it is 0 for every rank, otherwise that of one that ended badly: on one host, the first.");
  command->callback([options, &action] { action = [options] { return run_launch(*options); }; });
}

}  // namespace deep_ep::tools
